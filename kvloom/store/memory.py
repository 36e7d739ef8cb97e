"""A store in this process's memory: the least recently used entries go when the bound is reached."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvloom.errors import MethodError
from kvloom.store.base import Store, StoreStats, check_key, parse_size, stores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvloom.kv import ChunkKV

logger = logging.getLogger(__name__)


@stores.register("memory")
class MemoryStore(Store):
    """Entries are kept as given, without copies, up to `limit_bytes` of tensors in all, safe in threads."""

    def __init__(self, limit_bytes: int = 4 * 2**30) -> None:
        super().__init__()
        if limit_bytes < 1:
            raise MethodError(f"a memory store of {limit_bytes} bytes holds nothing; give at least 1")
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[str, ChunkKV] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``memory:`` or ``memory:SIZE``."""
        return cls(parse_size(rest)) if rest else cls()

    @property
    def where(self) -> str:
        return "memory"

    def get(self, key: str) -> ChunkKV | None:
        """The entry as it was put, now the most recently used; or None."""
        check_key(key)
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is `kv` itself, unless it alone exceeds the bound: then there is none, and a warning."""
        check_key(key)
        with self._lock:
            self._remove(key)
            if kv.num_bytes <= self.limit_bytes:
                while self._num_bytes + kv.num_bytes > self.limit_bytes:
                    self._remove(next(iter(self._entries)))
                self._entries[key] = kv
                self._num_bytes += kv.num_bytes
                return
        logger.warning(
            "memory: entry %s of %d bytes is not kept: the store holds %d; give it more, as in memory:8GiB",
            key,
            kv.num_bytes,
            self.limit_bytes,
        )

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return self._remove(key)

    def keys(self) -> Iterator[str]:
        """The keys of this moment, least recently used first."""
        with self._lock:
            return iter(list(self._entries))

    def contains(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return key in self._entries

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                where=self.where,
                entries=len(self._entries),
                num_bytes=self._num_bytes,
                limit_bytes=self.limit_bytes,
                rejected=len(self.rejections),
            )

    def _remove(self, key: str) -> bool:
        kv = self._entries.pop(key, None)
        if kv is None:
            return False
        self._num_bytes -= kv.num_bytes
        return True
