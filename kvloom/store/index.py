"""ChunkIndex: what a folder's files say, once more in SQLite, for those who would not read a million files.

It is never the truth: an index that is missing, locked, damaged or of another version answers None, and who
asked looks at the files. Any number of processes may use one at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

VERSION = 3
BUSY_S = 1.0  # the longest that a statement waits for another process
ASLEEP_S = 10.0  # after a failure the index is left alone that long, so that it costs a second only once
TOUCHES = 64  # so many last uses are written at once
MAX_GONE = 200_000  # remembered entries that are no longer there
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}  # the last: not our tables

_SCHEMA = """
CREATE TABLE chunks (
    key TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, created REAL NOT NULL, last_used REAL NOT NULL,
    num_tokens INTEGER, fingerprint TEXT, start INTEGER, pinned INTEGER NOT NULL DEFAULT 0, codec TEXT,
    content TEXT, compressor TEXT
) WITHOUT ROWID;
CREATE INDEX chunks_by_use ON chunks (pinned, last_used);
CREATE INDEX chunks_by_content ON chunks (content);
CREATE TABLE totals (entries INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER chunk_came AFTER INSERT ON chunks BEGIN
    UPDATE totals SET entries = entries + 1, num_bytes = num_bytes + new.num_bytes; END;
CREATE TRIGGER chunk_went AFTER DELETE ON chunks BEGIN
    UPDATE totals SET entries = entries - 1, num_bytes = num_bytes - old.num_bytes; END;
CREATE TRIGGER chunk_changed AFTER UPDATE OF num_bytes ON chunks BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes; END;
CREATE TABLE gone (key TEXT PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, since REAL NOT NULL)
    WITHOUT ROWID;
CREATE TABLE documents (id TEXT PRIMARY KEY, source TEXT NOT NULL, content_hash TEXT NOT NULL,
    recipe TEXT NOT NULL, num_tokens INTEGER NOT NULL, recorded REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE document_chunks (id TEXT NOT NULL, place INTEGER NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (id, place)) WITHOUT ROWID;
CREATE INDEX document_chunks_by_key ON document_chunks (key);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_ROW = (
    "key, num_bytes, created, last_used, num_tokens, fingerprint, start, pinned, codec, content, compressor"
)
_UPSERT = f"""
INSERT INTO chunks ({_ROW}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET
    num_bytes = excluded.num_bytes, created = excluded.created,
    last_used = max(chunks.last_used, excluded.last_used),
    num_tokens = coalesce(excluded.num_tokens, num_tokens),
    fingerprint = coalesce(excluded.fingerprint, fingerprint), start = coalesce(excluded.start, start),
    pinned = excluded.pinned, codec = coalesce(excluded.codec, codec),
    content = coalesce(excluded.content, content), compressor = coalesce(excluded.compressor, compressor)
"""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class IndexedChunk:
    """What the index knows of one entry; None: its head has not been read."""

    key: str
    num_bytes: int
    created: float  # seconds since 1970
    last_used: float
    num_tokens: int | None = None
    fingerprint: str | None = None
    start: int | None = None
    pinned: bool = False
    codec: str | None = None
    content: str | None = None  # a digest of its tokens; only who wrote it knows
    compressor: str | None = None

    def row(self) -> tuple[object, ...]:
        return tuple(vars(self)[name] for name in _ROW.split(", "))


class ChunkIndex:
    """The tables in the file `path`, which is made when first needed. Methods answer None, or do nothing,
    while the index cannot be used. Safe in threads, and in a forked process.
    """

    def __init__(self, path: Path, *, is_empty: Callable[[], bool]) -> None:
        self.path = path
        self._is_empty = (
            is_empty  # is the store, when the index is made? Then it sees everything from the start
        )
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int, int] | None = None  # of this process and the file it has open
        self._asleep_until = 0.0
        self._touched: dict[str, float] = {}

    def open(self) -> None:
        """The tables are there, if they can be: made before the first entry, they see all that ever was."""
        self.run(lambda _: None)

    # --- chunks

    def put(self, chunk: IndexedChunk) -> None:
        """The entry was written now."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(_UPSERT, chunk.row())
            db.execute("DELETE FROM gone WHERE key = ?", (chunk.key,))

        self.run(work)

    def sync(self, low: str, high: str, chunks: Sequence[IndexedChunk]) -> None:
        """Of the keys from `low` to below `high`, the entries are exactly these."""

        def work(db: sqlite3.Connection) -> None:
            known = {
                key for (key,) in db.execute("SELECT key FROM chunks WHERE key >= ? AND key < ?", (low, high))
            }
            gone = known - {chunk.key for chunk in chunks}
            db.executemany("DELETE FROM chunks WHERE key = ?", [(key,) for key in gone])
            _note_gone(db, gone, "vanished", "")
            db.executemany(_UPSERT, [chunk.row() for chunk in chunks])
            db.executemany("DELETE FROM gone WHERE key = ?", [(chunk.key,) for chunk in chunks])

        self.run(work)

    def touch(self, key: str) -> None:
        """The entry was used now; written down later, with others."""
        with self._lock:
            self._touched[key] = time.time()
            is_due = len(self._touched) >= TOUCHES
        if is_due:
            self.flush()

    def flush(self) -> None:
        """What `touch` has collected is written, or dropped: the files know it too."""
        with self._lock:
            touched, self._touched = self._touched, {}
        if touched:
            rows = [(when, key) for key, when in touched.items()]
            self.run(lambda db: db.executemany("UPDATE chunks SET last_used = ? WHERE key = ?", rows))

    def remove(self, key: str, reason: str, detail: str = "") -> None:
        """The entry is gone, and why."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM chunks WHERE key = ?", (key,))
            _note_gone(db, [key], reason, detail)

        self.run(work)

    def set_pinned(self, key: str, pinned: bool) -> None:
        self.run(lambda db: db.execute("UPDATE chunks SET pinned = ? WHERE key = ?", (pinned, key)))

    def chunk(self, key: str) -> IndexedChunk | None:
        rows = self.chunks("WHERE key = ?", (key,))
        return rows[0] if rows else None

    def oldest(self, number: int) -> list[IndexedChunk] | None:
        """Entries that are not pinned, the least recently used first."""
        self.flush()
        return self.chunks("WHERE pinned = 0 ORDER BY last_used LIMIT ?", (number,))

    def chunks(self, clause: str = "", values: tuple[object, ...] = ()) -> list[IndexedChunk] | None:
        names = _ROW.split(", ")

        def work(db: sqlite3.Connection) -> list[IndexedChunk]:
            rows = db.execute(f"SELECT {_ROW} FROM chunks {clause}", values)
            return [IndexedChunk(**dict(zip(names, row, strict=True))) for row in rows]

        return self.run(work)

    def num_bytes(self) -> int | None:
        """Bytes of all entries that the index knows."""
        return self.run(lambda db: db.execute("SELECT num_bytes FROM totals").fetchone()[0])

    def fate(self, key: str) -> tuple[str, str] | None:
        """The reason why the entry is gone and its detail: "here" if the index thinks it is there, "never"
        or "unknown" if it has no record of it.
        """

        def work(db: sqlite3.Connection) -> tuple[str, str]:
            if row := db.execute("SELECT reason, detail FROM gone WHERE key = ?", (key,)).fetchone():
                return row
            if db.execute("SELECT 1 FROM chunks WHERE key = ?", (key,)).fetchone():
                return "here", ""
            return ("never" if _meta(db, "from_the_start") else "unknown"), ""

        return self.run(work)

    def same_content(self, content: str) -> list[IndexedChunk]:
        """Entries of the same tokens, whatever computed them; a few if there are many."""

        return self.chunks("WHERE content = ? LIMIT 16", (content,)) or []

    @property
    def file_number(self) -> int | None:
        """The inode of the index: another one after it was removed, or made anew."""
        try:
            return self.path.stat().st_ino
        except OSError:
            return None

    # --- running

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns, in one transaction; None while the index cannot be used."""
        with self._lock:
            if time.monotonic() < self._asleep_until:
                return None
            for attempt in range(2):
                try:
                    db = self._connect()
                    with db:
                        return work(db)
                except FileNotFoundError:  # the folder is gone; whoever writes makes it again
                    self._close()
                    return None
                except (sqlite3.Error, OSError) as error:
                    self._close()
                    if attempt or not (_is_damage(error) and self._set_aside(error)):
                        self._asleep_until = time.monotonic() + ASLEEP_S
                        # Where nothing can be written, an index is not missed: the store only serves.
                        level = logging.DEBUG if _is_read_only(error) else logging.WARNING
                        logger.log(level, "%s: the store goes on without its index: %s", self.path, error)
                        return None
        return None

    def close(self) -> None:
        """What was collected is written; the index opens again when it is used."""
        self.flush()
        with self._lock:
            self._close()

    def _connect(self) -> sqlite3.Connection:
        """The open connection, if it is this process's and its file is still in place; else a new one."""
        if self._connection is not None and self._identity == self._current():
            return self._connection
        if self._identity is not None and self._identity[0] == os.getpid():
            self._close()
        self._connection = None  # a parent's connection must not even be closed here
        with contextlib.suppress(FileExistsError):
            # For the mode, which SQLite gives its other files too. One that exists must not be opened here:
            # closing it would drop the locks that SQLite holds on it for other connections of this process.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        db = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        try:
            _use_wal(db)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < VERSION:
                self._create(db)
            elif version > VERSION:
                raise sqlite3.NotSupportedError(f"its version is {version}, beyond {VERSION}; update kvloom")
        except BaseException:
            db.close()
            raise
        self._connection, self._identity = db, self._current()
        return db

    def _create(self, db: sqlite3.Connection) -> None:
        """The tables are there, made by us or by another process at the same moment, in place of earlier
        ones.
        """
        db.execute("BEGIN IMMEDIATE")
        with db:
            if db.execute("PRAGMA user_version").fetchone() == (VERSION,):
                return
            old = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (name,) in old:  # of an earlier version; the files have it all but the reasons of misses
                db.execute(f'DROP TABLE "{name}"')
            for statement in _statements(_SCHEMA):
                db.execute(statement)
            if self._is_empty():
                db.execute("INSERT INTO meta VALUES ('from_the_start', '1')")
            db.execute(f"PRAGMA user_version = {VERSION}")

    def _current(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return os.getpid(), status.st_dev, status.st_ino

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        self._connection = self._identity = None

    def _set_aside(self, error: Exception) -> bool:
        """The damaged index is out of the way, so that a new one can be made."""
        logger.warning("%s: the index is damaged (%s) and made anew from the files", self.path, error)
        try:
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            os.replace(self.path, self.path.with_name(self.path.name + ".damaged"))
        except OSError:
            return False
        return True


def _statements(script: str) -> Iterable[str]:
    """The statements of `script`, which `executescript` would run outside of the transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _note_gone(db: sqlite3.Connection, keys: Iterable[str], reason: str, detail: str) -> None:
    rows = [(key, reason, detail, time.time()) for key in keys]
    db.executemany("INSERT OR REPLACE INTO gone VALUES (?, ?, ?, ?)", rows)
    if rows and rows[0][0].startswith("000"):  # now and then: one key in 4096
        db.execute(
            "DELETE FROM gone WHERE since <= (SELECT since FROM gone ORDER BY since DESC LIMIT 1 OFFSET ?)",
            (MAX_GONE,),
        )


def _meta(db: sqlite3.Connection, name: str) -> str | None:
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if row is None else row[0]


def _use_wal(db: sqlite3.Connection) -> None:
    """Readers do not wait for writers. Changing to it fails at once while another process does the same."""
    patience = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")  # an index that lost its last seconds is still an index
            return
        except sqlite3.OperationalError as error:
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > patience:
                raise
            time.sleep(0.005)


def _code(error: Exception) -> int | None:
    """SQLite's own number of the failure; errors of the Python module itself have none."""
    return vars(error).get("sqlite_errorcode", 0) & 0xFF


def _is_damage(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE


def _is_read_only(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
    return _code(error) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
