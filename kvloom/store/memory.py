"""A store in this process's memory: the least recently used entries go when the bound is reached."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar

from kvloom.errors import MethodError
from kvloom.store.base import Store, StoreStats, check_key, stores
from kvloom.store.documents import MemoryDocuments
from kvloom.store.lookup import Lookup, Miss
from kvloom.store.namespace import parse_namespace
from kvloom.store.packing import PACKING_OPTIONS
from kvloom.store.url import parse_size, read_options, split_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from kvloom.kv import ChunkKV

logger = logging.getLogger(__name__)

MAX_GONE = 100_000  # remembered entries that are no longer there


@stores.register("memory")
class MemoryStore(Store):
    """Entries are kept as given, without copies, up to `limit_bytes` of tensors in all, safe in threads."""

    is_immediate: ClassVar[bool] = True

    def __init__(self, limit_bytes: int = 4 * 2**30, *, namespace: str | None = None) -> None:
        super().__init__()
        self.namespace = "" if namespace is None else parse_namespace(namespace)
        if limit_bytes < 1:
            raise MethodError(f"a memory store of {limit_bytes} bytes holds nothing; give at least 1")
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[str, ChunkKV] = OrderedDict()  # least recently used first
        self._gone: OrderedDict[str, Miss] = OrderedDict()  # the longest gone first
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._documents = MemoryDocuments(self)

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``memory:`` or ``memory:SIZE``, with ``?namespace=NAME`` for keys of a namespace."""
        size, given = split_options(cls.name, rest)
        for option in PACKING_OPTIONS.keys() & given:
            raise MethodError(
                f"store 'memory' has no option {option!r}: it keeps chunks as they are, without files; "
                "give it to a disk, redis or fsspec store"
            )
        namespace = read_options(cls.name, given, {"namespace": parse_namespace}).get("namespace")
        return cls(parse_size(size), namespace=namespace) if size else cls(namespace=namespace)

    @property
    def where(self) -> str:
        return "memory"

    @property
    def documents(self) -> MemoryDocuments:
        return self._documents

    def get(self, key: str) -> ChunkKV | None:
        """The entry as it was put, now the most recently used; or None."""
        return self.lookup(key).kv

    def _find(self, key: str) -> Lookup:
        with self._lock:
            kv = self._entries.get(key)
            if kv is not None:
                self._entries.move_to_end(key)
                return self._hit(key, kv, kv.num_bytes)
        return self._miss(key, *self.absence(key))

    def absence(self, key: str) -> tuple[Miss, str]:
        check_key(key)
        with self._lock:
            reason = self._gone.get(key, Miss.NEVER_STORED)
        return reason, f"to stay within {self.limit_bytes:,} bytes" if reason is Miss.EVICTED else ""

    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is `kv` itself, unless it alone exceeds the bound: then there is none, and a warning."""
        check_key(key)
        start = time.perf_counter()
        evicted = 0
        with self._lock:
            self._remove(key, Miss.EVICTED)
            fits = kv.num_bytes <= self.limit_bytes
            if fits:
                while self._num_bytes + kv.num_bytes > self.limit_bytes:
                    evicted += self._remove(next(iter(self._entries)), Miss.EVICTED)
                self._entries[key] = kv
                self._num_bytes += kv.num_bytes
                self._gone.pop(key, None)
        for _ in range(evicted):
            self.metrics.evicted(self.label, "memory")
        if fits:
            self.metrics.stored(self.label, kv.num_bytes, time.perf_counter() - start)
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
            return self._remove(key, Miss.DELETED)

    def _set_aside(self, key: str, reason: str) -> bool:
        with self._lock:
            return self._remove(key, Miss.DAMAGED)

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

    def _remove(self, key: str, reason: Miss) -> bool:
        kv = self._entries.pop(key, None)
        if kv is None:
            return False
        self._gone[key] = reason
        self._gone.move_to_end(key)
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self._num_bytes -= kv.num_bytes
        return True
