"""A store in a folder: one file per chunk (docs/format.md), shared by any number of processes."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import EntryHead, Store, StoreStats, check_key, is_key, stores
from kvloom.store.documents import FOLDER, FolderDocuments
from kvloom.store.eviction import Quota, exclusive
from kvloom.store.files import cause, listing, read_entry, read_head, sync_folder, write_file
from kvloom.store.folder import (
    INDEX,
    NAMESPACES,
    PINS,
    QUARANTINE,
    SUFFIX,
    by_status,
    entries_of,
    entry_name,
    shards,
    sweep,
)
from kvloom.store.format import DamagedEntry, UnreadableEntry, decode_head
from kvloom.store.index import ChunkIndex, IndexedChunk
from kvloom.store.lookup import Kin, Lookup, Miss, content_digest
from kvloom.store.namespace import namespace_id
from kvloom.store.packing import ENTRY_OPTIONS, Packing, entry_arguments
from kvloom.store.url import parse_duration, parse_seconds, parse_size, read_options, split_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from torch import Tensor

    from kvloom.kv import ChunkKV

_FULL = {errno.ENOSPC, errno.EDQUOT}


@stores.register("disk")
class DiskStore(Store):
    """Entries are files ``PATH/ab/abcd...safetensors``, complete or absent at any moment, even after a crash.

    Temporary files that a killed writer left, older than `sweep_after_s` seconds, are gone. The folder is
    created if need be; one that cannot be written still serves reads. Entries are written by `packing`. A
    `namespace` has a folder, and so entries, documents, pins, a quota and an index, of its own. Raises
    ``StoreError`` when the folder cannot be made or read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        quota_bytes: int | None = None,
        sweep_after_s: float = 3600.0,
        packing: Packing | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__()
        self.packing = Packing.of() if packing is None else packing
        self.namespace = namespace or ""
        rooms = () if namespace is None else (NAMESPACES, namespace_id(namespace))
        try:
            self.path = Path(path).expanduser().absolute()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for room in rooms:
                self.path /= room
                self.path.mkdir(mode=0o700, exist_ok=True)
            for folder in (*(shard.path for shard in shards(self.path)), self.path / FOLDER):
                sweep(folder, sweep_after_s)
        except FileExistsError:
            raise StoreError(f"cannot open {path}: it is a file; name a folder with --store") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise StoreError(f"cannot open {path}: {cause(error)}; choose another with --store") from error
        self.quota_bytes = quota_bytes
        self._quota = None if quota_bytes is None else Quota(self, quota_bytes)
        self.index = ChunkIndex(self.path / INDEX, is_empty=lambda: not any(shards(self.path)))
        self.index.open()
        self._documents = FolderDocuments(self)

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``disk:PATH?quota=SIZE&sweep_after=SECONDS&deadline=SECONDS&namespace=NAME``, and how entries are
        packed; ``~`` is the home folder.
        """
        path, given = split_options(cls.name, rest)
        readers = {"quota": parse_size, "sweep_after": parse_duration, "deadline": parse_seconds}
        readers |= ENTRY_OPTIONS
        options = read_options(cls.name, given, readers)
        if not path:
            raise MethodError("store 'disk:' names no folder; write 'disk:PATH'")
        store = cls(
            path,
            quota_bytes=options.get("quota"),
            sweep_after_s=options.get("sweep_after", 3600.0),
            **entry_arguments(options),
        )
        store.deadline_s = options.get("deadline")
        return store

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def documents(self) -> FolderDocuments:
        return self._documents

    def get(self, key: str) -> ChunkKV | None:
        """The entry, its CPU tensors sharing one buffer; or None, and `rejections` has any fault."""
        return self.lookup(key).kv

    def _find(self, key: str) -> Lookup:
        path = self._file(key)
        try:
            content = read_entry(key, path)
            kv = self.packing.unpack(key, content)
        except FileNotFoundError:
            return self._miss(key, *self.absence(key))
        except (OSError, UnreadableEntry, DamagedEntry) as error:
            return self._miss(key, *self._fault(key, error))
        self.index.touch(key)
        return self._hit(key, kv, len(content))

    def describe(self, key: str) -> EntryHead | None:
        try:
            return decode_head(key, *read_head(self._file(key)))
        except FileNotFoundError:
            return None
        except (OSError, UnreadableEntry, DamagedEntry) as error:
            self._fault(key, error)
            return None

    def _fault(self, key: str, error: Exception) -> tuple[Miss, str]:
        if isinstance(error, OSError):
            error = UnreadableEntry(f"cannot be read: {cause(error)}")
        return super()._fault(key, error)

    def absence(self, key: str) -> tuple[Miss, str]:
        check_key(key)
        fate, detail = self.index.fate(key) or ("unknown", "")
        if fate == "here":
            self.index.remove(key, Miss.VANISHED)
            return Miss.VANISHED, "its file was removed from outside"
        if fate in set(Miss):
            return Miss(fate), detail
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (self.path / QUARANTINE / f"{key}.txt").read_text(encoding="utf-8")
            return Miss.DAMAGED, text.removeprefix(f"{key}{SUFFIX} ").strip()
        return (Miss.NEVER_STORED if fate == "never" else Miss.UNKNOWN), ""

    def kin(self, token_ids: Tensor) -> list[Kin]:
        held = self.index.same_content(content_digest(token_ids))
        return [Kin(chunk.fingerprint or "", chunk.compressor or "") for chunk in held]

    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is on the disk, durably; raises ``StoreError`` if it cannot be written."""
        start = time.perf_counter()
        path = self._file(key)
        pieces = self.packing.pack(key, kv)
        num_bytes = sum(len(piece) for piece in pieces)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # each, for the mode
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.is_dir():
                self.reject(key, "a folder stood in its place")
            if self._quota is not None:
                self._quota.make_room(key, num_bytes)
            write_file(path, pieces)
        except OSError as error:
            raise self._cannot("write to", error) from error
        now = time.time()
        self.index.put(
            IndexedChunk(
                key=key,
                num_bytes=num_bytes,
                created=now,
                last_used=now,
                num_tokens=kv.num_tokens,
                fingerprint=kv.fingerprint,
                start=kv.start,
                codec=str(self.packing.coding),
                content=content_digest(kv.token_ids),
                compressor=kv.compressor,
                pinned=self.is_pinned(key),
            )
        )
        self.metrics.stored(self.label, num_bytes, time.perf_counter() - start)

    def delete(self, key: str) -> bool:
        path = self._file(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot delete from {self.path}: {cause(error)}; make it writable") from error
        self._unmark(key)
        self.index.remove(key, Miss.DELETED)
        return True

    def keys(self) -> Iterator[str]:
        """Every key, ascending."""
        for entry in self._entries():
            yield entry.name.removesuffix(SUFFIX)

    def contains(self, key: str) -> bool:
        return self._file(key).is_file()

    def stats(self) -> StoreStats:
        """What the folder holds now; bytes are those of the files."""
        entries = num_bytes = 0
        for entry in self._entries():
            with contextlib.suppress(FileNotFoundError):
                num_bytes += entry.stat().st_size
                entries += 1
        return StoreStats(
            where=self.where,
            entries=entries,
            num_bytes=num_bytes,
            limit_bytes=self.quota_bytes,
            rejected=len(self.rejections),
            quarantined=sum(entry.name.endswith(SUFFIX) for entry in listing(self.path / QUARANTINE)),
            pinned=len(self.pins()),
        )

    # --- what stays and what goes

    def pin(self, key: str) -> bool:
        """The entry is never evicted, which a file ``pins/KEY`` says; False if there is no entry."""
        check_key(key)
        marker = self.path / PINS / key
        try:
            with exclusive(self):  # no process evicts it between the look and the marker
                if not self._file(key).is_file():
                    return False
                marker.parent.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(marker, os.O_WRONLY | os.O_CREAT, 0o600))
                sync_folder(marker.parent)
        except OSError as error:
            raise self._cannot("pin in", error) from error
        self.index.set_pinned(key, True)
        return True

    def unpin(self, key: str) -> bool:
        check_key(key)
        if not self.is_pinned(key):
            return False
        self._unmark(key)
        return True

    def is_pinned(self, key: str) -> bool:
        """True if there is a marker; asked of the file, which outlives any index."""
        check_key(key)
        return (self.path / PINS / key).exists()

    def pins(self) -> set[str]:
        """The keys of all pinned entries."""
        return {entry.name for entry in listing(self.path / PINS) if is_key(entry.name)}

    def _unmark(self, key: str) -> None:
        try:
            (self.path / PINS / key).unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._cannot("unpin in", error) from error
        self.index.set_pinned(key, False)

    def evict(self, chunk: IndexedChunk) -> int:
        """The entry has made room, unless it is pinned; returns the bytes freed. Call it under the lock."""
        if self.is_pinned(chunk.key):
            self.index.set_pinned(chunk.key, True)
            return 0
        # Noted before it is done: of a process that is killed between, the next scan finds the file again.
        self.index.remove(chunk.key, Miss.EVICTED, "to stay within the quota")
        with contextlib.suppress(FileNotFoundError):
            self._file(chunk.key).unlink()
            self.metrics.evicted(self.label, "quota")
        return chunk.num_bytes

    def size_of(self, key: str) -> int:
        """Bytes of the entry's file; 0 if there is none."""
        try:
            return self._file(key).stat().st_size
        except OSError:
            return 0

    def scan(self) -> Iterator[IndexedChunk]:
        """Every entry as its file and the pins know it, unread."""
        pins = self.pins()
        for chunk in map(by_status, self._entries()):
            if chunk is not None:
                yield replace(chunk, pinned=chunk.key in pins)

    def reconcile(self) -> None:
        """The index knows each entry's size and last use, though not yet what others have written of it."""
        self._sync_index(lambda _: None)

    def rebuild(self, progress: Callable[[int], None] | None = None) -> int:
        """The index says what the files say of themselves: entries by their heads, pins and documents."""
        done = 0

        def head_of(key: str) -> EntryHead | None:
            nonlocal done
            head = self.describe(key)
            done += head is not None
            if progress is not None:
                progress(done)
            return head

        self._sync_index(head_of)
        self._documents.reindex()
        return done

    def _sync_index(self, head_of: Callable[[str], EntryHead | None]) -> None:
        pins = self.pins()
        self.index.flush()
        for number in range(256):
            low, high = f"{number:02x}", f"{number + 1:02x}" if number < 255 else "g"
            chunks = []
            for entry in entries_of(self.path / low):
                key = entry.name.removesuffix(SUFFIX)
                head, chunk = head_of(key), by_status(entry)
                if chunk is not None:
                    chunks.append(replace(chunk, pinned=key in pins, **_fields(head)))
            self.index.sync(low, high, chunks)

    def flush(self, timeout_s: float = 30.0) -> bool:
        self.index.flush()
        return True

    def _file(self, key: str) -> Path:
        check_key(key)
        return self.path / entry_name(key)

    def _set_aside(self, key: str, reason: str) -> bool:
        quarantine = self.path / QUARANTINE
        try:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            os.replace(self._file(key), quarantine / f"{key}{SUFFIX}")
            self.index.remove(key, Miss.DAMAGED, reason)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write to {quarantine}: {cause(error)}; make it writable") from error
        with contextlib.suppress(OSError):  # the entry is out of the way, and the reason is in the log
            write_file(quarantine / f"{key}.txt", [f"{key}{SUFFIX} {reason}\n".encode()])
        return True

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            for shard in shards(self.path):
                yield from entries_of(shard)
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {cause(error)}; make it readable") from error

    def _cannot(self, what: str, error: OSError) -> StoreError:
        if isinstance(error, Timeout):
            return StoreError(
                f"cannot {what} {self.path}: another process keeps its lock; end it or try again"
            )
        remedy = "free space" if error.errno in _FULL else "make it writable"
        return StoreError(
            f"cannot {what} {self.path}: {cause(error)}: {remedy} or choose another store with --store"
        )


def _fields(head: EntryHead | None) -> dict[str, Any]:
    if head is None:
        return {}
    return {name: getattr(head, name) for name in ("num_tokens", "fingerprint", "start", "codec")}
