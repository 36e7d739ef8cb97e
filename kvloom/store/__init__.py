"""Where the KV of chunks lives between requests."""

from kvloom.store.base import (
    Rejection,
    Store,
    StoreStats,
    chunk_key,
    open_store,
    parse_size,
    stores,
)
from kvloom.store.disk import DiskStore
from kvloom.store.memory import MemoryStore

__all__ = [
    "DiskStore",
    "MemoryStore",
    "Rejection",
    "Store",
    "StoreStats",
    "chunk_key",
    "open_store",
    "parse_size",
    "stores",
]
