"""Eviction: a disk store stays within its quota, the least recently used entries that nobody pinned going
first.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from filelock import AcquireReturnProxy, FileLock, Timeout

from kvloom.errors import StoreError
from kvloom.store.files import cause

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from kvloom.store.disk import DiskStore
    from kvloom.store.index import IndexedChunk

LOCK = "store.lock"
LOCK_S = 2.0  # an evicting process holds the lock for milliseconds; a stopped one must not stop the others
POLL_S = 0.002  # a waiter looks that often, and who takes the lock again and again leaves it that long
BATCH = 16
_NONE_YET = -1  # no file has that number


def exclusive(store: DiskStore, patience_s: float | None = None) -> AcquireReturnProxy:
    """The folder's lock among processes, held until the end of the ``with`` that it is called in: for what
    must not be done by two at once. Raises filelock's ``Timeout``, after `LOCK_S` unless given.
    """
    patience_s = LOCK_S if patience_s is None else patience_s
    return FileLock(store.path / LOCK, mode=0o600).acquire(patience_s, poll_interval=POLL_S)


class Quota:
    """Makes room in a store that holds at most `num_bytes`."""

    def __init__(self, store: DiskStore, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._store = store
        # The index file in which this process has looked for entries that it does not know; None: there is no
        # index.
        self._counted: int | None = _NONE_YET
        self._estimate: int | None = None  # of all entries, while there is no index
        self._lock = threading.Lock()

    def make_room(self, key: str, num_bytes: int) -> None:
        """An entry of that size fits under the key. Raises ``StoreError`` when it never will."""
        store = self._store
        if num_bytes > self.num_bytes:
            raise StoreError(
                f"cannot write to {store.path}: an entry of {num_bytes:,} bytes exceeds the quota of "
                f"{self.num_bytes:,}; raise quota= in the store's URL"
            )
        with self._lock:
            if self._counted != store.index.file_number:
                store.reconcile()
                self._counted = store.index.file_number
            if self._excess(key, num_bytes) > 0:
                self._free(key, num_bytes)
            if self._estimate is not None:
                self._estimate += num_bytes - store.size_of(key)

    def _free(self, key: str, num_bytes: int) -> None:
        try:
            with exclusive(self._store):
                # Counted again: another process may have made room while this one waited for the lock.
                self._estimate = None
                excess = self._excess(key, num_bytes)
                for chunk in self._oldest():
                    if excess <= 0:
                        return
                    freed = self._store.evict(chunk) if chunk.key != key else 0
                    excess -= freed
                    if self._estimate is not None:
                        self._estimate -= freed
        except Timeout:
            raise StoreError(
                f"cannot write to {self._store.path}: another process has kept {LOCK} for {LOCK_S:g} s; "
                "end it or try again"
            ) from None
        except OSError as error:
            raise StoreError(
                f"cannot evict from {self._store.path}: {cause(error)}; make it writable"
            ) from error
        if excess > 0:
            raise StoreError(
                f"cannot write to {self._store.path}: pinned entries fill the quota of {self.num_bytes:,} "
                "bytes; unpin some, or raise quota= in the store's URL"
            )

    def _excess(self, key: str, num_bytes: int) -> int:
        """Bytes to free before the entry of `num_bytes` can stand under the key."""
        held = self._store.index.num_bytes()
        if held is not None:
            self._estimate = None
        elif self._estimate is None:
            self._estimate = sum(chunk.num_bytes for chunk in self._store.scan())
        held = self._estimate if held is None else held
        assert held is not None, "counted, by the index or by the files"
        return held + num_bytes - self._store.size_of(key) - self.num_bytes

    def _oldest(self) -> Iterator[IndexedChunk]:
        """Entries to evict, the least recently used first."""
        index = self._store.index
        seen: set[str] = set()
        while (batch := index.oldest(BATCH)) is not None:
            fresh = [chunk for chunk in batch if chunk.key not in seen]
            if not fresh:
                return
            seen.update(chunk.key for chunk in fresh)
            yield from fresh
        chunks = [chunk for chunk in self._store.scan() if not chunk.pinned and chunk.key not in seen]
        yield from sorted(chunks, key=lambda chunk: chunk.last_used)


def last_used(status: os.stat_result) -> float:
    """Seconds since 1970: reads set the time of access themselves, since many mounts do not."""
    return max(status.st_atime, status.st_mtime)
