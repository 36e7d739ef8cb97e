"""A store of tiers, the fastest first: reads go down until one has the entry, writes go to all.

A tier that is slow or gone costs a request no more than computing the chunk again would: each is asked for as
long as its `deadline` says, or else all together for as long as the prefill of the chunk takes; see
`Store.set_prefill_speed`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvloom.errors import MethodError, StoreError
from kvloom.store.base import EntryHead, Rejection, Store, StoreStats, check_key, open_store, stores
from kvloom.store.disk import DiskStore
from kvloom.store.documents import FolderDocuments
from kvloom.store.lookup import Lookup, Miss, most_telling
from kvloom.store.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from torch import Tensor

    from kvloom.kv import ChunkKV
    from kvloom.store.documents import Documents
    from kvloom.store.lookup import Kin
    from kvloom.store.metrics import StoreMetrics

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNPRICED_S = 5.0  # patience while nobody has said how fast chunks are computed
WEIGHT = 0.1  # of a new entry in the mean size of entries


@stores.register("tiers")
class TieredStore(Store):
    """The given stores as one, all of one namespace. An entry found in a lower one is copied into those above
    it.
    """

    def __init__(self, parts: Sequence[Store], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        flat = [
            store for part in parts for store in (part.parts if isinstance(part, TieredStore) else [part])
        ]
        if not flat:
            raise MethodError("a store of tiers needs at least one; write for example memory:4GiB,disk:PATH")
        if len({store.namespace for store in flat}) > 1:
            found = ", ".join(
                f"{repr(store.namespace) if store.namespace else 'none'} for {store.label}" for store in flat
            )
            raise MethodError(f"tiers have one namespace in common, got {found}; give each the same")
        self.namespace = flat[0].namespace
        self.parts = flat
        self._tiers = [Tier(store, clock) for store in flat]
        self._tokens_per_s: float | None = None
        self._mean_tokens: float | None = None
        self._bytes_per_token: float | None = None
        for store in flat:
            store.rejections = self.rejections  # one account of what was found wrong, wherever it was

    @classmethod
    def from_url(cls, rest: str) -> Self:
        """``tiers:URL,URL,...``; the scheme may be left out."""
        if not rest:
            raise MethodError("store 'tiers:' names no tier; write for example memory:4GiB,disk:PATH")
        return cls([open_store(rest)])

    @property
    def where(self) -> str:
        return ", ".join(store.where for store in self.parts)

    def use_metrics(self, metrics: StoreMetrics) -> None:
        super().use_metrics(metrics)
        for tier in self._tiers:
            tier.store.use_metrics(metrics)
            if not tier.store.is_immediate:
                metrics.breaker(tier.store.label, tier.breaker.state)

    def set_prefill_speed(self, tokens_per_s: float) -> None:
        super().set_prefill_speed(tokens_per_s)
        self._tokens_per_s = tokens_per_s

    def get(self, key: str) -> ChunkKV | None:
        """The entry from the first tier that has it; None also when those that may have it do not answer."""
        return self.lookup(key).kv

    def lookup(self, key: str, *, num_tokens: int | None = None) -> Lookup:
        check_key(key)
        start = time.perf_counter()
        patience_s = self._patience_s(num_tokens)
        num_bytes = (num_tokens or self._mean_tokens or 0) * (self._bytes_per_token or 0.0)
        tried: list[Lookup] = []
        for place, tier in enumerate(self._tiers):
            left_s = max(0.0, patience_s - (time.perf_counter() - start))
            found = tier.lookup(key, left_s, num_bytes)
            if found.kv is not None:
                self._measure(found.kv)
                for upper in self._tiers[:place]:
                    upper.put_later(key, found.kv)
                break
            tried.append(found)
        else:
            found = replace(most_telling(tuple(tried)), tier=self.label)
        result = replace(found, tried=tuple(tried), seconds=time.perf_counter() - start)
        if result.kv is None:
            self.metrics.looked_up(result)
        return result

    def put(self, key: str, kv: ChunkKV) -> None:
        """The entry is in every tier that takes it within the deadline; in the others it may still come.

        Raises ``StoreError`` when none that outlives the process takes it; one that does not is a warning.
        """
        check_key(key)
        self._measure(kv)
        patience_s = self._patience_s(kv.num_tokens)
        errors: list[tuple[Tier, StoreError]] = []
        for tier in self._tiers:
            try:
                tier.put(key, kv, patience_s)
            except StoreError as error:
                errors.append((tier, error))
        failed = [tier for tier, _ in errors]
        if errors and all(tier in failed or tier.store.is_immediate for tier in self._tiers):
            raise StoreError("; ".join(str(error) for _, error in errors))
        for tier, error in errors:
            logger.warning("an entry was not written to %s: %s", tier.store.where, error)

    def delete(self, key: str) -> bool:
        """The entry is gone from every tier; ``StoreError`` names those where it may still be."""
        check_key(key)
        return any(self._everywhere(lambda store: store.delete(key)))

    def keys(self) -> Iterator[str]:
        """The keys of all tiers that answer, each once, ascending."""
        found: set[str] = set()
        for tier in self._tiers:
            try:
                found |= tier.ask(lambda store=tier.store: set(store.keys()))
            except StoreError as error:
                logger.warning("%s is left out: %s", tier.store.where, error)
        yield from sorted(found)

    def contains(self, key: str) -> bool:
        """True if a tier has the entry; one that does not answer has none."""
        check_key(key)
        return any(self._ask(tier, lambda store: store.contains(key), False) for tier in self._tiers)

    def describe(self, key: str) -> EntryHead | None:
        check_key(key)
        heads = (self._ask(tier, lambda store: store.describe(key), None) for tier in self._tiers)
        return next((head for head in heads if head is not None), None)

    def kin(self, token_ids: Tensor) -> list[Kin]:
        found = (self._ask(tier, lambda store: store.kin(token_ids), []) for tier in self._tiers)
        return next((kin for kin in found if kin), [])

    def absence(self, key: str) -> tuple[Miss, str]:
        check_key(key)
        found = []
        for tier in self._tiers:
            try:
                reason, detail = tier.ask(lambda store=tier.store: store.absence(key))
            except StoreError as error:
                reason, detail = Miss.DOWN, str(error)
            found.append(Lookup(key=key, tier=tier.store.label, reason=reason, detail=detail))
        worst = most_telling(tuple(found))
        return worst.reason or Miss.UNKNOWN, worst.detail

    def stats(self) -> StoreStats:
        """What all tiers hold: each entry counted once, bytes wherever they lie."""
        tiers = tuple(tier.stats() for tier in self._tiers)
        sizes = [tier.num_bytes for tier in tiers if tier.num_bytes is not None]
        homes = [store.stats() for store in self.parts if isinstance(store, DiskStore)]
        return StoreStats(
            where=self.where,
            entries=sum(1 for _ in self.keys()),
            num_bytes=sum(sizes) if sizes else None,
            rejected=len(self.rejections),
            quarantined=sum(home.quarantined for home in homes),
            pinned=sum(home.pinned for home in homes),
            tiers=tiers,
        )

    def reject(self, key: str, reason: str) -> None:
        """The entry is out of every tier: where one had it wrong, the others may have copied it."""
        check_key(key)
        for tier in self._tiers:
            self._ask(tier, lambda store: store.reject(key, reason), None)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Rejection]:
        """Every entry of every tier has been read; a tier that does not answer is a warning."""
        wrong: list[Rejection] = []
        for tier in self._tiers:
            try:
                wrong += tier.store.verify(progress)
            except StoreError as error:
                logger.warning("%s is left out: %s", tier.store.where, error)
        return wrong

    def flush(self, timeout_s: float = 30.0) -> bool:
        end = time.monotonic() + timeout_s
        return all(
            tier.wait(max(0.0, end - time.monotonic())) and tier.store.flush(timeout_s)
            for tier in self._tiers
        )

    def pin(self, key: str) -> bool:
        return self._home().pin(key)

    def unpin(self, key: str) -> bool:
        return self._home().unpin(key)

    def is_pinned(self, key: str) -> bool:
        return any(store.is_pinned(key) for store in self.parts)

    def rebuild(self, progress: Callable[[int], None] | None = None) -> int:
        return self._home().rebuild(progress)

    @property
    def documents(self) -> Documents:
        """Those of the disk tier; chunks that are freed go from all tiers."""
        return FolderDocuments(self._home(), self)

    def _home(self) -> DiskStore:
        for store in self.parts:
            if isinstance(store, DiskStore):
                return store
        raise StoreError(
            f"{self.where} has no disk tier, which keeps documents, pins and an index; add disk:PATH"
        )

    def _patience_s(self, num_tokens: float | None) -> float:
        """Seconds that computing the chunk would take; a chunk of unknown size is like those seen."""
        num_tokens = num_tokens or self._mean_tokens
        return UNPRICED_S if self._tokens_per_s is None or not num_tokens else num_tokens / self._tokens_per_s

    def _measure(self, kv: ChunkKV) -> None:
        if kv.num_tokens:
            each = kv.num_bytes / kv.num_tokens
            self._mean_tokens = _mean(self._mean_tokens, kv.num_tokens)
            self._bytes_per_token = _mean(self._bytes_per_token, each)

    def _ask(self, tier: Tier, work: Callable[[Store], T], otherwise: T) -> T:
        try:
            return tier.ask(lambda: work(tier.store))
        except StoreError:
            return otherwise

    def _everywhere(self, work: Callable[[Store], T]) -> list[T]:
        """What `work` returns of each tier, after all had their turn; then ``StoreError`` for those that
        failed.
        """
        results, errors = [], []
        for tier in self._tiers:
            try:
                results.append(tier.ask(lambda store=tier.store: work(store)))
            except StoreError as error:
                errors.append(f"{tier.store.where}: {error}")
        if errors:
            raise StoreError(f"not done everywhere: {'; '.join(errors)}; try again when it answers")
        return results


def _mean(before: float | None, new: float) -> float:
    return new if before is None else (1 - WEIGHT) * before + WEIGHT * new
