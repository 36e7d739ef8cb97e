"""A store in a folder: one file per chunk (docs/format.md), shared by any number of processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import EntryHead, Store, StoreStats, check_key, is_key, stores
from kvloom.store.format import DamagedEntry, UnreadableEntry, decode_head, head_bytes
from kvloom.store.namespace import namespace_id
from kvloom.store.packing import Packing
from kvloom.store.query import ENTRY_OPTIONS, convert, split_query

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from io import BufferedReader
    from typing import Self

    from kvloom.kv import ChunkKV

SUFFIX = ".safetensors"
QUARANTINE = "quarantine"
NAMESPACES = "namespaces"

T = TypeVar("T")

_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9]+\.[0-9a-f]{32}\.tmp")
_FULL = {errno.ENOSPC, errno.EDQUOT}


@stores.register("disk")
class DiskStore(Store):
    """Entries are files ``PATH/ab/abcd...safetensors``, complete or absent at any moment, even after a crash.

    Temporary files that a killed writer left, older than `sweep_after_s` seconds, are gone. The folder is
    created if need be; one that cannot be written still serves reads. Raises ``StoreError`` when it cannot be
    made or read.

    Entries are written by `codec` (``raw``, ``bf16``, ``fp8``, ``int8``, ``int4``, each with ``+zstd`` or
    without) and encrypted with the key in `key_file` or ``$KVLOOM_STORE_KEY``, if any; entries of every codec
    are read, and plain ones too unless `encrypted_only`. A `namespace` has a folder and keys of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sweep_after_s: float = 3600.0,
        codec: str = "raw",
        key_file: str | os.PathLike[str] | None = None,
        encrypted_only: bool = False,
        namespace: str | None = None,
    ) -> None:
        super().__init__()
        self.packing = Packing.of(codec=codec, key_file=key_file, encrypted_only=encrypted_only)
        rooms = () if namespace is None else (NAMESPACES, namespace_id(namespace))
        self.namespace = namespace or ""
        try:
            self.path = Path(path).expanduser().absolute()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for room in rooms:
                self.path /= room
                self.path.mkdir(mode=0o700, exist_ok=True)
            self._sweep(sweep_after_s)
        except FileExistsError:
            raise StoreError(f"cannot open {path}: it is a file; name a folder with --store") from None
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise StoreError(f"cannot open {path}: {_cause(error)}; choose another with --store") from error

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``disk:PATH?OPTION=VALUE&...``, where ``~`` is the home folder."""
        place, options = split_query(rest)
        if not place:
            raise MethodError(f"store 'disk:{rest}' names no folder; write 'disk:PATH'")
        return cls(place, **convert(options, ENTRY_OPTIONS))

    @property
    def where(self) -> str:
        return str(self.path)

    def get(self, key: str) -> ChunkKV | None:
        """The entry, its CPU tensors sharing one buffer; or None, and `rejections` has any fault."""
        return self._decoded(key, lambda path: self.packing.unpack(key, _read(key, path)))

    def describe(self, key: str) -> EntryHead | None:
        return self._decoded(key, lambda path: decode_head(key, *_read_head(path)))

    def _decoded(self, key: str, decode_file: Callable[[Path], T]) -> T | None:
        try:
            return decode_file(self._file(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._leave(key, f"cannot be read: {_cause(error)}")
        except UnreadableEntry as error:
            self._leave(key, str(error))
        except DamagedEntry as error:
            self.reject(key, str(error))
        return None

    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is on the disk, durably; raises ``StoreError`` if it cannot be written."""
        path = self._file(key)
        pieces = self.packing.pack(key, kv)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_dir():
                self.reject(key, "a folder stood in its place")
            _write(path, pieces)
        except OSError as error:
            remedy = "free space" if error.errno in _FULL else "make it writable"
            raise StoreError(
                f"cannot write to {self.path}: {_cause(error)}: {remedy} or choose another store with --store"
            ) from error

    def delete(self, key: str) -> bool:
        path = self._file(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot delete from {self.path}: {_cause(error)}; make it writable") from error
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
            rejected=len(self.rejections),
            quarantined=sum(entry.name.endswith(SUFFIX) for entry in _listing(self.path / QUARANTINE)),
        )

    def _file(self, key: str) -> Path:
        check_key(key)
        return self.path / key[:2] / f"{key}{SUFFIX}"

    def _set_aside(self, key: str, reason: str) -> bool:
        quarantine = self.path / QUARANTINE
        try:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            os.replace(self._file(key), quarantine / f"{key}{SUFFIX}")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write to {quarantine}: {_cause(error)}; make it writable") from error
        with contextlib.suppress(OSError):  # the entry is out of the way, and the reason is in the log
            (quarantine / f"{key}.txt").write_text(f"{key}{SUFFIX} {reason}\n", encoding="utf-8")
        return True

    def _shards(self) -> Iterator[os.DirEntry[str]]:
        for shard in _listing(self.path):
            if len(shard.name) == 2 and is_key(shard.name * 32) and shard.is_dir():
                yield shard

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            for shard in self._shards():
                for entry in _listing(shard.path):
                    key = entry.name.removesuffix(SUFFIX)
                    if key != entry.name and is_key(key) and key.startswith(shard.name) and entry.is_file():
                        yield entry
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {_cause(error)}; make it readable") from error

    def _sweep(self, sweep_after_s: float) -> None:
        now = time.time()
        for shard in self._shards():
            for entry in _listing(shard.path):
                if _TEMPORARY.fullmatch(entry.name):
                    # Another process may have swept it, and a folder we cannot write still serves reads.
                    with contextlib.suppress(OSError):
                        if now - entry.stat().st_mtime >= sweep_after_s:
                            os.unlink(entry.path)


def _open(path: Path) -> BufferedReader:
    """The file, opened without waiting for anyone; ``DamagedEntry`` for a folder, a pipe or a device in its
    place.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedEntry("it is not a regular file")
    return open(descriptor, "rb")


def _read(key: str, path: Path) -> memoryview:
    """The file's bytes in memory of their own: a mapped file that is cut short would kill the process.

    The header is checked first, so that a file which only claims to be large takes no memory.
    """
    decode_head(key, *_read_head(path))
    with _open(path) as file:
        content = numpy.empty(os.fstat(file.fileno()).st_size, dtype=numpy.uint8).data
        return content[: file.readinto(content)]


def _read_head(path: Path) -> tuple[memoryview, int]:
    """The file's bytes up to the end of its header, and the size of the whole."""
    with _open(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        beginning = file.read(8)
        rest = file.read(max(0, head_bytes(beginning, num_bytes) - len(beginning)))
    return memoryview(beginning + rest), num_bytes


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """`path` holds the pieces, durably; after an exception before that, nothing has changed."""
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _listing(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def _cause(error: Exception) -> str:
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return text[:1].lower() + text[1:]
