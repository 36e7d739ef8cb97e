"""Where the KV of chunks lives between requests."""

from kvloom.store.base import (
    EntryHead,
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
    "EntryHead",
    "MemoryStore",
    "Rejection",
    "Store",
    "StoreStats",
    "chunk_key",
    "open_store",
    "parse_size",
    "stores",
]
