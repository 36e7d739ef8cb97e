"""A store of the four methods with faults that a test switches on and off."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvloom.errors import StoreError
from kvloom.store.base import Store, Unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvloom.kv import ChunkKV


class FaultyStore(Store):
    """`fault` is "down" (raises), "wrong" (raises what no store should), "hangs", "slow", "full" or ""."""

    def __init__(self, *, seconds: float = 0.3) -> None:
        super().__init__()
        self.entries: dict[str, ChunkKV] = {}
        self.fault = ""
        self.seconds = seconds
        self.calls = 0
        self.released = threading.Event()

    def _suffer(self, *, writes: bool = False) -> None:
        self.calls += 1
        if self.fault == "down":
            raise Unreachable("faulty does not answer: connection refused")
        if self.fault == "wrong":
            raise RuntimeError("a bug")
        if self.fault == "hangs":
            self.released.wait(30)
        if self.fault == "slow":
            time.sleep(self.seconds)
        if self.fault == "full" and writes:
            raise StoreError("faulty is full")

    def get(self, key: str) -> ChunkKV | None:
        self._suffer()
        return self.entries.get(key)

    def put(self, key: str, kv: ChunkKV) -> None:
        self._suffer(writes=True)
        self.entries[key] = kv

    def delete(self, key: str) -> bool:
        self._suffer()
        return self.entries.pop(key, None) is not None

    def keys(self) -> Iterator[str]:
        self._suffer()
        return iter(list(self.entries))
