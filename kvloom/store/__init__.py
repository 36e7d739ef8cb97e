"""Where the KV of chunks lives between requests."""

from kvloom.store.base import (
    EntryHead,
    Rejection,
    Store,
    StoreStats,
    chunk_key,
    open_store,
    stores,
)
from kvloom.store.disk import DiskStore
from kvloom.store.memory import MemoryStore
from kvloom.store.url import parse_size

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
