"""Store: where the KV of chunks lives between requests, and the keys it lives under.

A store maps a key to a `ChunkKV` and may lose any entry at any time: whoever asks must be able to compute it
again. So an entry that turns out wrong is a miss with a reason, never an exception, and it costs only itself.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from kvloom.errors import MethodError, StoreError
from kvloom.registry import Registry
from kvloom.store.lookup import DamagedEntry, Lookup, Miss
from kvloom.store.metrics import StoreMetrics
from kvloom.store.url import split_tiers, with_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from torch import Tensor

    from kvloom.kv import ChunkKV
    from kvloom.store.documents import Documents
    from kvloom.store.lookup import Kin

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of keys, and of files that neither codec nor cipher made; see docs/format.md

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_KEY = re.compile("[0-9a-f]{64}")


class Unreachable(StoreError):
    """The place where the store keeps its entries does not answer; another call may be answered."""


@dataclass(frozen=True)
class Rejection:
    """An entry that turned out wrong, and why."""

    key: str
    reason: str
    set_aside: bool = True  # False: left in place, because it is not ours to move or cannot be moved


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """One tier of a store, and whether it is asked now."""

    name: str
    where: str
    entries: int | None  # None: it does not answer
    num_bytes: int | None
    limit_bytes: int | None
    breaker: str  # "closed", "half-open", or "open": not asked
    failures: int  # calls in a row that failed or came too late
    retry_in_s: float  # until it is asked again; 0 unless open
    deadline_s: float | None  # the one given; None: priced
    latency_s: float | None  # measured, of a request that finds nothing
    bytes_per_s: float | None  # measured
    detail: str = ""  # why it does not answer


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """What a store holds now, counted without reading the entries."""

    where: str
    entries: int
    num_bytes: int | None  # None: this store cannot tell without reading its entries
    limit_bytes: int | None = None  # None: no bound of its own
    rejected: int = 0  # entries found wrong since this store was opened
    quarantined: int = 0  # entries found wrong by anyone and kept aside for inspection
    pinned: int = 0  # entries that are never evicted
    tiers: tuple[TierStats, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EntryHead:
    """What an entry says of itself, its contents unread and unchecked."""

    key: str
    num_tokens: int
    num_bytes: int
    fingerprint: str
    start: int
    codec: str = "raw"  # how keys and values are written
    is_encrypted: bool = False


class Store(ABC):
    """A map from chunk keys to `ChunkKV`; four methods make a store, the others have working defaults.

    Keys are 64 lower-case hexadecimal characters (`chunk_key`); methods raise ``ValueError`` for any other.
    """

    name: str = ""  # set by `stores.register`
    namespace: str = ""  # the tenant whose chunks it holds; `kvloom.store.namespace`
    is_remote: ClassVar[bool] = False  # True: it may stop answering, so it is only asked with a deadline
    is_immediate: ClassVar[bool] = False  # True: it never waits for anything, so it needs no deadline

    def __init__(self) -> None:
        self.rejections: list[Rejection] = []
        self.metrics = StoreMetrics()
        self.deadline_s: float | None = None  # the longest a request waits for it as a tier; None: priced

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """The store that ``SCHEME:rest`` names; raises ``MethodError`` when `rest` does not fit."""
        raise MethodError(f"store {cls.name!r} cannot be opened from {rest!r}; pass a {cls.__name__} instead")

    @abstractmethod
    def get(self, key: str) -> ChunkKV | None:
        """The entry, or None: it is absent, or it was found wrong and `rejections` says why."""

    @abstractmethod
    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is `kv`, whatever it was before; raises ``StoreError`` when it cannot be written."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """The entry is gone; True if it was there."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Every key; entries put or deleted meanwhile may or may not be among them."""

    def chunk_key(
        self, fingerprint: str, header_ids: Tensor, chunk_ids: Tensor, *, compressor: str = ""
    ) -> str:
        """`chunk_key` in this store's namespace: the one way to a key for whoever has a store."""
        namespace = self.namespace
        return chunk_key(fingerprint, header_ids, chunk_ids, compressor=compressor, namespace=namespace)

    @property
    def where(self) -> str:
        """The place, as messages name it."""
        return type(self).__name__

    @property
    def label(self) -> str:
        """The kind of store, as lookups and metrics name it."""
        return self.name or type(self).__name__

    def lookup(self, key: str, *, num_tokens: int | None = None) -> Lookup:
        """What `get` finds, with where it was or why it was not, and counted in the metrics.

        A store of tiers prices its patience by `num_tokens`, the tokens that would be computed instead.
        """
        check_key(key)
        start = time.perf_counter()
        found = replace(self._find(key), seconds=time.perf_counter() - start)
        self.metrics.looked_up(found)
        return found

    def _find(self, key: str) -> Lookup:
        before = len(self.rejections)
        kv = self.get(key)
        if kv is not None:
            return self._hit(key, kv, kv.num_bytes)
        fault = next((found for found in self.rejections[before:] if found.key == key), None)
        if fault is not None:
            return self._miss(key, Miss.DAMAGED, fault.reason)
        return self._miss(key, *self.absence(key))

    def kin(self, token_ids: Tensor) -> list[Kin]:
        """How entries of the tokens (T,) were computed, under whatever key, as far as the store knows; it
        tells why the key asked for is missing.
        """
        return []

    def _hit(self, key: str, kv: ChunkKV, num_bytes: int) -> Lookup:
        return Lookup(key=key, tier=self.label, kv=kv, num_bytes=num_bytes)

    def _miss(self, key: str, reason: Miss, detail: str = "") -> Lookup:
        return Lookup(key=key, tier=self.label, reason=reason, detail=detail)

    def absence(self, key: str) -> tuple[Miss, str]:
        """Why there is no such entry, as far as this store knows, and what completes the reason."""
        check_key(key)
        return Miss.UNKNOWN, ""

    def set_prefill_speed(self, tokens_per_s: float) -> None:
        """A store of tiers no longer waits for a chunk than computing it would take at this speed."""
        if not tokens_per_s > 0:
            raise ValueError(f"a prefill speed is more than 0 tokens a second, got {tokens_per_s}")

    def use_metrics(self, metrics: StoreMetrics) -> None:
        """From now on the store counts into `metrics`."""
        self.metrics = metrics

    def flush(self, timeout_s: float = 30.0) -> bool:
        """What is being written in the background is written; False if that took longer."""
        return True

    def pin(self, key: str) -> bool:
        """The entry is never evicted; False if there is none. Raises ``StoreError`` in a store without
        pins.
        """
        raise StoreError(f"{self.where} pins nothing; use a disk store, as in disk:PATH?quota=200GiB")

    def unpin(self, key: str) -> bool:
        """The entry may be evicted again; False if it was not pinned."""
        raise StoreError(f"{self.where} pins nothing; use a disk store, as in disk:PATH?quota=200GiB")

    def is_pinned(self, key: str) -> bool:
        """True if the entry is never evicted."""
        check_key(key)
        return False

    def rebuild(self, progress: Callable[[int], None] | None = None) -> int:
        """The index says what the entries say of themselves; returns their number."""
        raise StoreError(f"{self.where} has no index to rebuild; only a disk store has one")

    @property
    def documents(self) -> Documents:
        """Documents by name, and the chunks that are theirs."""
        raise StoreError(f"{self.where} keeps no documents; use a disk store, such as disk:PATH")

    def contains(self, key: str) -> bool:
        """True if there is an entry; its contents are not read, so `get` may still find it wrong."""
        check_key(key)
        return key in set(self.keys())

    def __contains__(self, key: str) -> bool:
        return self.contains(key)

    def describe(self, key: str) -> EntryHead | None:
        """The entry's head; or None: it is absent, or what was read is wrong and `rejections` says why."""
        kv = self.get(key)
        if kv is None:
            return None
        return EntryHead(
            key=key,
            num_tokens=kv.num_tokens,
            num_bytes=kv.num_bytes,
            fingerprint=kv.fingerprint,
            start=kv.start,
        )

    def stats(self) -> StoreStats:
        """What the store holds now."""
        entries = sum(1 for _ in self.keys())
        return StoreStats(where=self.where, entries=entries, num_bytes=None, rejected=len(self.rejections))

    def reject(self, key: str, reason: str) -> None:
        """The entry is out of the store, and remembered in `rejections`; an absent one is no rejection.

        For entries that turned out wrong: damaged, or made by another model. `reason` completes "the entry
        ...", as in "is of another model".
        """
        check_key(key)
        try:
            was_there = self._set_aside(key, reason)
        except StoreError:
            self._leave(key, reason)
        else:
            if was_there:
                self._note(Rejection(key, reason))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Rejection]:
        """Every entry has been read, and the wrong ones rejected and returned.

        `progress` is called after each entry with the number read so far and the number of all.
        """
        keys = list(self.keys())
        # What was left in place earlier is looked at again, so its old verdict must not count twice.
        self.rejections[:] = [rejection for rejection in self.rejections if rejection.set_aside]
        before = len(self.rejections)
        for done, key in enumerate(keys, start=1):
            self.get(key)
            if progress is not None:
                progress(done, len(keys))
        return self.rejections[before:]

    def _set_aside(self, key: str, reason: str) -> bool:
        """The entry is no longer served; True if it was there. Raises ``StoreError`` when it must stay."""
        return self.delete(key)

    def _fault(self, key: str, error: Exception) -> tuple[Miss, str]:
        """An entry that is there could not be used: noted, and moved aside if it is damaged."""
        if isinstance(error, DamagedEntry):
            self.reject(key, str(error))
            return Miss.DAMAGED, str(error)
        self._leave(key, str(error))
        return Miss.UNREADABLE, str(error)

    def _leave(self, key: str, reason: str) -> None:
        """A miss that leaves the entry in place is remembered once, however often it is asked for."""
        rejection = Rejection(key, reason, set_aside=False)
        if rejection not in self.rejections:
            self._note(rejection)

    def _note(self, rejection: Rejection) -> None:
        self.rejections.append(rejection)
        fate = "set aside" if rejection.set_aside else "left in place"
        logger.warning("%s: entry %s %s; it is %s", self.where, rejection.key, rejection.reason, fate)
        self.metrics.damaged(self.label)


stores: Registry[Store] = Registry("store", "kvloom.store")


def open_store(url: str | Store, *, namespace: str | None = None) -> Store:
    """The store that a URL such as ``memory:4GiB`` or ``disk:~/chunks`` names; a `Store` comes back as it is.

    URLs joined by commas make a store of tiers, as a single one does that may stop answering. A `namespace`
    is that of each, as if all had the option. Raises ``MethodError`` for a URL that names no store,
    ``StoreError`` for a store that cannot be opened.
    """
    if isinstance(url, Store):
        if namespace not in (None, url.namespace):
            raise MethodError(f"the store is open in namespace {url.namespace!r}, not in {namespace!r}")
        return url
    if not isinstance(url, str):
        raise MethodError(f"store {url!r} is neither text nor a Store; write 'disk:{url}'")
    opened = [_open_one(part) for part in split_tiers(in_namespace(url, namespace), stores)]
    if len(opened) == 1 and not opened[0].is_remote and opened[0].deadline_s is None:
        return opened[0]
    from kvloom.store.tiers import TieredStore

    return TieredStore(opened)


def in_namespace(url: str, namespace: str | None) -> str:
    """The URL, with the option `namespace` for each tier unless that is None."""
    if namespace is None:
        return url
    return ",".join(with_option(tier, "namespace", namespace) for tier in split_tiers(url, stores))


def _open_one(url: str) -> Store:
    scheme, colon, rest = url.partition(":")
    if not colon and scheme in stores:
        raise MethodError(f"store {url!r} lacks its colon; write '{url}:'")
    if not url:
        raise MethodError("store '' names nothing; write 'memory:' or 'disk:PATH'")
    if not colon or not scheme.isidentifier():
        raise MethodError(f"store {url!r} has no scheme; for a folder write 'disk:{url}'")
    return stores[scheme].from_url(rest)


def check_key(key: str) -> None:
    """Raises ``ValueError`` unless `key` is 64 lower-case hexadecimal characters."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ValueError(f"key {key!r} is not 64 lower-case hexadecimal characters; make it with chunk_key")


def is_key(text: str) -> bool:
    """True if `text` could be a key."""
    return _KEY.fullmatch(text) is not None


def chunk_key(
    fingerprint: str,
    header_ids: Tensor,
    chunk_ids: Tensor,
    *,
    compressor: str = "",
    namespace: str = "",
) -> str:
    """The key of a chunk's KV: SHA-256 over format version, fingerprint, header ids, chunk ids, the
    compressor if one dropped some of its rows, and the namespace if there is one; never over the codec.

    What may be missing stands behind its name, so that no value of one passes for another. `header_ids` and
    `chunk_ids` are (T,) of any signed integer type; raises ``ValueError`` for others.
    """
    parts = [b"kvloom-chunk", str(FORMAT_VERSION).encode(), fingerprint.encode()]
    for name, ids in (("header_ids", header_ids), ("chunk_ids", chunk_ids)):
        if ids.ndim != 1 or ids.dtype not in _INTEGERS:
            raise ValueError(f"{name} must be (T,) integers, got {tuple(ids.shape)} of {ids.dtype}")
        parts.append(ids.detach().cpu().numpy().astype("<i8").tobytes())
    for name, value in (("compressor", compressor), ("namespace", namespace)):
        if value:
            parts += [name.encode(), value.encode()]
    return hashlib.sha256(b"".join(fields(parts))).hexdigest()


def fields(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Each part behind its length (8 bytes, little-endian): no two lists of parts give the same bytes."""
    for part in parts:
        yield len(part).to_bytes(8, "little")
        yield part
