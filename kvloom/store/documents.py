"""Documents by name: which chunks are theirs, where they came from, and what is freed when they go.

A document's chunks are entries of the store like any others, and may be evicted: what is recorded here is
whose they are. Chunks of several documents are stored once, and go with the last of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash
from filelock import Timeout

from kvloom.errors import DocumentError, StoreError
from kvloom.store import document_rows
from kvloom.store.base import Store, check_key, is_key
from kvloom.store.eviction import POLL_S, exclusive
from kvloom.store.files import cause, listing, open_regular, write_file
from kvloom.store.lookup import DamagedEntry

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvloom.store.disk import DiskStore

logger = logging.getLogger(__name__)

FOLDER = "documents"
FORMAT = "kvloom-document"
VERSION = 2
PATIENCE_S = 60.0  # for the folder's lock, which other processes may take for document after document
_FIELDS = {"id", "keys", "source", "content_hash", "recipe", "num_tokens", "recorded"}
_NOT_A_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class StoredDocument:
    """What is known of one document."""

    id: str
    keys: tuple[str, ...]  # of its chunks, in order; the same one may come twice
    source: str = ""  # the path it was read from
    content_hash: str = ""  # of title and text; see `content_hash`
    recipe: str = ""  # of all else that its chunks follow from: model, header, chunk length, compressor
    num_tokens: int = 0  # of its chunks together
    recorded: float = 0.0  # seconds since 1970


@dataclass(frozen=True, kw_only=True)
class Change:
    """What recording or removing a document did."""

    kept: tuple[str, ...] = ()  # chunks that the document had before
    new: tuple[str, ...] = ()  # chunks that it did not have
    freed: tuple[str, ...] = ()  # chunks that were its own alone and are gone from the store
    missing: tuple[
        str, ...
    ] = ()  # chunks that the store does not hold: evicted, or freed by another meanwhile


def content_hash(text: str, title: str | None = None) -> str:
    """SHA-256 of title and text: equal for documents that give equal chunks."""
    parts = (title or "").encode("utf-8", "surrogatepass"), text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


def check_id(id: str) -> None:
    """Raises ``DocumentError`` unless `id` is one line of text: not blank, no control characters."""
    if not isinstance(id, str) or not id.strip() or _NOT_A_LINE.search(id):
        raise DocumentError(f"document id {id!r} is not a line of text; give it one")


def as_id(text: str) -> str:
    """The text with what no id may hold written as escapes, such as ``\\n``."""
    return _NOT_A_LINE.sub(lambda found: ascii(found[0])[1:-1], text)


def documents_of(store: Store) -> Documents | None:
    """The store's documents; None for a store that keeps none."""
    try:
        return store.documents
    except StoreError:
        return None


class Documents(ABC):
    """The documents of a store. `store` is where freed chunks go from: for tiers, all of them."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @abstractmethod
    def get(self, id: str) -> StoredDocument | None:
        """The document, or None."""

    @abstractmethod
    def all(self) -> list[StoredDocument]:
        """Every document, by id."""

    @abstractmethod
    def users(self, keys: Iterable[str]) -> dict[str, int]:
        """Of each key that any document has, how many documents have it."""

    @abstractmethod
    def _write(self, document: StoredDocument) -> None: ...

    @abstractmethod
    def _erase(self, id: str) -> None: ...

    @abstractmethod
    def _alone(self) -> AbstractContextManager[Any]:
        """Inside, no one else changes documents."""

    def record(
        self,
        id: str,
        keys: Sequence[str],
        *,
        source: str = "",
        content_hash: str = "",
        recipe: str = "",
        num_tokens: int = 0,
    ) -> Change:
        """The document is these chunks, whatever it was before; what it no longer has and nobody else uses is
        freed.

        Store the chunks first. Those in `Change.missing` were not there any more: store them again.
        """
        check_id(id)
        for key in keys:
            check_key(key)
        with self._alone():
            before = self.get(id)
            held = dict.fromkeys(before.keys if before else ())
            document = StoredDocument(
                id=id,
                keys=tuple(keys),
                source=source,
                content_hash=content_hash,
                recipe=recipe,
                num_tokens=num_tokens,
                recorded=time.time(),
            )
            self._write(document)
            unique = dict.fromkeys(keys)
            return Change(
                kept=tuple(key for key in unique if key in held),
                new=tuple(key for key in unique if key not in held),
                freed=self._free([key for key in held if key not in unique]),
                missing=tuple(key for key in unique if key not in self.store),
            )

    def remove(self, id: str) -> Change:
        """The document is forgotten, and the chunks that nobody else uses are gone.

        Raises ``DocumentError`` for one that is not there.
        """
        with self._alone():
            before = self.get(id)
            if before is None:
                raise DocumentError(f"there is no document {id!r}; see kvloom store list --documents")
            self._erase(id)
            return Change(freed=self._free(list(dict.fromkeys(before.keys))))

    def _free(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Those of the keys that were entries which no document has and nobody pinned, now deleted."""
        used = self.users(keys)
        freed = []
        for key in keys:
            if key not in used and not self.store.is_pinned(key):
                try:
                    is_gone = self.store.delete(key)
                except StoreError as error:  # the documents are right all the same; the entry may be evicted
                    logger.warning("entry %s was not freed: %s", key, error)
                    continue
                if is_gone:
                    freed.append(key)
                    self.store.metrics.evicted(self.store.label, "unused")
        return tuple(freed)


class MemoryDocuments(Documents):
    """The documents of a store that ends with the process."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._documents: dict[str, StoredDocument] = {}
        self._lock = threading.RLock()

    def get(self, id: str) -> StoredDocument | None:
        return self._documents.get(id)

    def all(self) -> list[StoredDocument]:
        with self._lock:
            return [self._documents[id] for id in sorted(self._documents)]

    def users(self, keys: Iterable[str]) -> dict[str, int]:
        return _count(self.all(), keys)

    def _write(self, document: StoredDocument) -> None:
        self._documents[document.id] = document

    def _erase(self, id: str) -> None:
        del self._documents[id]

    def _alone(self) -> AbstractContextManager[Any]:
        return self._lock


class FolderDocuments(Documents):
    """One file ``documents/SHA-256 of the id.json`` for each, and the same again in the store's index.

    The index is believed while the folder is as it was when the index last saw it; else, or without an index,
    the files are read.
    """

    def __init__(self, home: DiskStore, store: Store | None = None) -> None:
        super().__init__(home if store is None else store)
        self._home = home
        self._folder = home.path / FOLDER

    def get(self, id: str) -> StoredDocument | None:
        return self._read(self._file(id))

    def all(self) -> list[StoredDocument]:
        if self._index_is_fresh() and (rows := self._home.index.run(document_rows.select)) is not None:
            return [StoredDocument(**row) for row in rows]
        return self._read_all()

    def users(self, keys: Iterable[str]) -> dict[str, int]:
        wanted = set(keys)
        if self._index_is_fresh():
            found = self._home.index.run(lambda db: document_rows.users(db, wanted))
            if found is not None:
                return found
        return _count(self._read_all(), wanted)

    def reindex(self) -> None:
        """The index says of documents what the files say."""
        stamp = self._stamp()  # before they are read: a change meanwhile leaves the index stale, not wrong
        documents = self._read_all()

        def work(db: sqlite3.Connection) -> None:
            document_rows.clear(db)
            for document in documents:
                document_rows.insert(db, document)
            document_rows.set_stamp(db, stamp)

        self._home.index.run(work)

    def _write(self, document: StoredDocument) -> None:
        is_fresh = self._index_is_fresh()
        fields = {"format": FORMAT, "version": VERSION, **asdict(document)}
        text = json.dumps(fields | {"checksum": _checksum(fields)}, ensure_ascii=True, indent=1)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_file(self._file(document.id), [text.encode()])
        except OSError as error:
            raise StoreError(f"cannot write to {self._folder}: {cause(error)}; make it writable") from error
        if is_fresh:
            self._home.index.run(lambda db: self._replace(db, document))

    def _erase(self, id: str) -> None:
        is_fresh = self._index_is_fresh()
        try:
            self._file(id).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot delete from {self._folder}: {cause(error)}; make it writable"
            ) from error
        if is_fresh:
            self._home.index.run(lambda db: (document_rows.delete(db, id), self._mark(db)))

    def _alone(self) -> AbstractContextManager[Any]:
        return _alone(self._home)

    def _file(self, id: str) -> Path:
        name = hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / f"{name}.json"

    def _read_all(self) -> list[StoredDocument]:
        try:
            names = [entry.name for entry in listing(self._folder)]
        except OSError as error:
            raise StoreError(
                f"cannot read {self._folder}: {cause(error)}; make it a readable folder"
            ) from error
        paths = [self._folder / name for name in names if name.endswith(".json")]
        found = [document for path in paths if (document := self._read(path)) is not None]
        return sorted(found, key=lambda document: document.id)

    def _read(self, path: Path) -> StoredDocument | None:
        """The document of one file; None, with a warning, for one that is not what was written."""
        try:
            with open_regular(path) as file:
                fields = json.loads(file.read())
            checksum = fields.pop("checksum")
            version = fields.pop("version")
            if fields.pop("format") != FORMAT or set(fields) != _FIELDS:
                raise ValueError("its members are not those of a document")
            if _checksum({"format": FORMAT, "version": version, **fields}) != checksum:
                raise ValueError("its checksum is not that of its contents")
            document = StoredDocument(**fields | {"keys": tuple(fields["keys"])})
            if version != VERSION or not all(map(is_key, document.keys)) or self._file(document.id) != path:
                raise ValueError("it is of another version, or under another name")
            return document
        except FileNotFoundError:
            return None
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            DamagedEntry,
        ) as error:
            logger.warning("%s cannot be used: %s; add the document again", path, error)
            return None

    def _stamp(self) -> str:
        """Changes whenever a file comes into the folder or leaves it."""
        try:
            return str(self._folder.stat().st_mtime_ns)
        except FileNotFoundError:
            return ""

    def _mark(self, db: sqlite3.Connection) -> None:
        document_rows.set_stamp(db, self._stamp())

    def _replace(self, db: sqlite3.Connection, document: StoredDocument) -> None:
        document_rows.delete(db, document.id)
        document_rows.insert(db, document)
        self._mark(db)

    def _index_is_fresh(self) -> bool:
        """True if the index knows the folder as it is; one that does not is brought up to date first."""
        for _ in range(2):
            stamps = self._home.index.run(lambda db: [document_rows.stamp(db)])
            if stamps is None:
                return False
            if stamps == [self._stamp()]:
                return True
            self.reindex()
        return False


@contextmanager
def _alone(home: DiskStore) -> Iterator[None]:
    """Inside, the folder's lock is held; failures to get it are sentences."""
    try:
        lock = exclusive(home, PATIENCE_S)
    except Timeout:
        raise StoreError(
            f"{home.path} is kept by another process that changes it; end it or try again"
        ) from None
    except OSError as error:
        raise StoreError(f"cannot write to {home.path}: {cause(error)}; make it writable") from error
    with lock:
        yield
    time.sleep(POLL_S)  # who records document after document lets others in


def _checksum(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return f"xxh3_128:{xxhash.xxh3_128(text.encode()).hexdigest()}"


def _count(documents: Iterable[StoredDocument], keys: Iterable[str]) -> dict[str, int]:
    wanted, used = set(keys), {}
    for document in documents:
        for key in wanted.intersection(document.keys):
            used[key] = used.get(key, 0) + 1
    return used
