"""Tier: one store among several, asked no longer than it is worth, and not while it does not answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from kvloom.errors import StoreError
from kvloom.store.base import Store, TierStats, Unreachable
from kvloom.store.breaker import Breaker
from kvloom.store.errands import Errands, TooLate, TooMany
from kvloom.store.lookup import Lookup, Miss

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloom.kv import ChunkKV

logger = logging.getLogger(__name__)

CALLS = 8  # at once; a place that has so many unanswered gets no more
ADMIN_S = 10.0  # patience of statistics, deletions and the like, which no answer waits for
WEIGHT = 0.3  # of a new measurement in the running mean
LATE = 1.5  # an answer that did not come in time is expected to take so many times as long
FORGET = 0.9  # each time that a tier is passed over as too slow, it is believed to be that much faster

T = TypeVar("T")


class Unanswered(StoreError):
    """The tier gave no answer, and why; nothing is known of the entry."""

    def __init__(self, reason: Miss, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Speed:
    """What was measured of one tier: running means, None before the first measurement."""

    def __init__(self) -> None:
        self.latency_s: float | None = None  # of a request that finds nothing
        self.s_per_byte: float | None = None
        self._lock = threading.Lock()

    def found(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            beyond = max(0.0, seconds - (self.latency_s or 0.0))
            self.s_per_byte = _mean(self.s_per_byte, beyond / max(num_bytes, 1))

    def missed(self, seconds: float) -> None:
        with self._lock:
            self.latency_s = _mean(self.latency_s, seconds)

    def late(self, num_bytes: int, seconds: float) -> None:
        """It took longer than that, nobody knows how long; so the next few requests do not wait for it."""
        with self._lock:
            self.s_per_byte = max(self.s_per_byte or 0.0, LATE * seconds / max(num_bytes, 1))

    def passed_over(self) -> None:
        with self._lock:
            self.latency_s = None if self.latency_s is None else FORGET * self.latency_s
            self.s_per_byte = None if self.s_per_byte is None else FORGET * self.s_per_byte

    def expected_s(self, num_bytes: float) -> float:
        """How long an entry of that size will take; 0 when nothing is known."""
        return (self.latency_s or 0.0) + num_bytes * (self.s_per_byte or 0.0)


class Tier:
    """A store behind its breaker and its deadline."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self.speed = Speed()
        self.breaker = Breaker(clock=clock, on_change=lambda state: store.metrics.breaker(store.label, state))
        self._errands = Errands(store.label, CALLS)

    def lookup(self, key: str, patience_s: float, num_bytes: float) -> Lookup:
        """What the store finds within its deadline, or else within `patience_s`; `num_bytes` are expected."""
        if self.store.is_immediate:
            return self.store.lookup(key)
        patience_s = self.patience_s(patience_s)
        if patience_s <= 0:
            return self._not_asked(key, Miss.DEADLINE, "the tiers above took all the time there was")
        expected_s = self.speed.expected_s(num_bytes)
        if expected_s > patience_s:
            self.speed.passed_over()
            detail = f"it would take {expected_s:.3g} s, and may take {patience_s:.3g} s"
            return self._not_asked(key, Miss.DEADLINE, detail)
        start = time.perf_counter()
        try:
            found = self.ask(lambda: self.store.lookup(key), patience_s, num_bytes)
        except Unanswered as unanswered:
            return self._not_asked(key, unanswered.reason, str(unanswered), time.perf_counter() - start)
        if found.kv is not None:
            self.speed.found(found.num_bytes, found.seconds)
        elif found.reason is not Miss.DOWN:
            self.speed.missed(found.seconds)
        return found

    def _not_asked(self, key: str, reason: Miss, detail: str, seconds: float = 0.0) -> Lookup:
        miss = Lookup(key=key, tier=self.store.label, reason=reason, detail=detail, seconds=seconds)
        self.store.metrics.looked_up(miss)
        return miss

    def patience_s(self, priced_s: float) -> float:
        """The deadline given for this tier, or else the priced one."""
        return priced_s if self.store.deadline_s is None else self.store.deadline_s

    def ask(
        self,
        work: Callable[[], T],
        patience_s: float = ADMIN_S,
        num_bytes: float = 0,
        *,
        is_write: bool = False,
    ) -> T:
        """What `work` on the store returns or raises; ``Unanswered`` when it is not asked, or not in time."""
        if self.store.is_immediate:
            return work()
        ticket = self._admitted()
        try:
            return self._errands.call(lambda: self._judged(work, ticket), patience_s, is_write=is_write)
        except TooLate:
            if num_bytes:
                self.speed.late(int(num_bytes), patience_s)
            raise Unanswered(Miss.DEADLINE, f"no answer within {patience_s:.3g} s") from None
        except TooMany:
            raise self._too_many(ticket) from None
        except Unreachable as error:
            raise Unanswered(Miss.DOWN, str(error)) from error
        except StoreError:
            raise
        except Exception as error:  # a store that others wrote may raise anything
            logger.warning("%s: %r", self.store.where, error)
            raise Unanswered(Miss.DOWN, repr(error)) from error

    def _admitted(self) -> int:
        ticket = self.breaker.admit()
        if ticket is None:
            detail = f"not asked for another {self.breaker.retry_in_s:.3g} s, since it does not answer"
            raise Unanswered(Miss.DOWN, detail)
        return ticket

    def _too_many(self, ticket: int) -> Unanswered:
        self.breaker.failed(ticket)
        return Unanswered(Miss.DOWN, f"{CALLS} calls have not been answered")

    def _judged(self, work: Callable[[], T], ticket: int) -> T:
        """What `work` returns or raises, and the breaker knows whether the place answered.

        An answer that comes too late is an answer: that it costs too much is for `speed` to say.
        """
        is_answer = False
        try:
            result = work()
            is_answer = not (isinstance(result, Lookup) and result.reason is Miss.DOWN)
            return result
        except StoreError as error:
            is_answer = not isinstance(error, Unreachable)
            raise
        finally:
            (self.breaker.succeeded if is_answer else self.breaker.failed)(ticket)

    def put(self, key: str, kv: ChunkKV, patience_s: float) -> None:
        """The entry is in the store, or still on its way there after the deadline; or ``StoreError``."""
        if self.store.is_immediate:
            self.store.put(key, kv)
            return
        is_late = threading.Event()

        def work() -> None:
            try:
                self.store.put(key, kv)
            except Exception as error:
                if is_late.is_set():
                    logger.warning("%s: an entry was not written there: %s", self.store.where, error)
                raise

        try:
            self.ask(work, self.patience_s(patience_s), is_write=True)
        except Unanswered as unanswered:
            if unanswered.reason is not Miss.DEADLINE:
                raise
            is_late.set()

    def put_later(self, key: str, kv: ChunkKV) -> None:
        """The entry will be in the store, unless that has enough to do or does not answer."""
        if self.store.is_immediate:
            self.store.put(key, kv)
            return

        def work(ticket: int) -> None:
            try:
                self._judged(lambda: self.store.put(key, kv), ticket)
            except Exception as error:  # nobody waits for it, and the entry stays where it was found
                logger.warning("%s: an entry was not copied there: %s", self.store.where, error)

        with contextlib.suppress(Unanswered):
            ticket = self._admitted()
            try:
                self._errands.begin(lambda: work(ticket))
            except TooMany:
                raise self._too_many(ticket) from None

    def wait(self, timeout_s: float) -> bool:
        """No write is on its way; False if that took longer."""
        return self._errands.wait(timeout_s)

    def stats(self) -> TierStats:
        """What the tier holds, if it answers, and its breaker either way."""
        entries = num_bytes = limit = None
        detail = ""
        try:
            held = self.ask(self.store.stats)
            entries, num_bytes, limit = held.entries, held.num_bytes, held.limit_bytes
        except StoreError as error:
            detail = str(error)
        s_per_byte = self.speed.s_per_byte
        return TierStats(
            name=self.store.label,
            where=self.store.where,
            entries=entries,
            num_bytes=num_bytes,
            limit_bytes=limit,
            breaker=self.breaker.state,
            failures=self.breaker.num_failures,
            retry_in_s=self.breaker.retry_in_s,
            deadline_s=self.store.deadline_s,
            latency_s=self.speed.latency_s,
            bytes_per_s=1 / s_per_byte if s_per_byte else None,
            detail=detail,
        )


def _mean(before: float | None, new: float) -> float:
    return new if before is None else (1 - WEIGHT) * before + WEIGHT * new
