"""Errands: calls on threads of their own, so that nobody waits longer for them than they are worth."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

EXIT_S = 5.0  # what is still being written when Python ends has that long


class TooLate(Exception):
    """The call has not ended in time; it goes on, and its result is dropped."""


class TooMany(Exception):
    """So many calls have not ended that no other is begun."""


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.result: T | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()


class _Running:
    """How many calls have not ended; apart from `Errands`, so that it can be waited for at exit."""

    def __init__(self) -> None:
        self.number = 0
        self.num_writes = 0  # of these
        self.changed = threading.Condition()

    def wait(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.num_writes == 0, timeout_s)


class Errands:
    """Runs calls on daemon threads, at most `limit` at once, so that a place that hangs costs no more threads
    than that, and does not keep the process from ending.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._running = _Running()
        at_exit = self._running.wait
        atexit.register(at_exit, EXIT_S)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def call(self, work: Callable[[], T], patience_s: float, *, is_write: bool) -> T:
        """What `work` returns or raises; ``TooLate`` after `patience_s`, ``TooMany`` at once."""
        outcome = self._start(work, is_write)
        if not outcome.ended.wait(patience_s):
            raise TooLate
        if outcome.error is not None:
            raise outcome.error
        return outcome.result  # type: ignore[return-value] # of the work, which may return None

    def begin(self, work: Callable[[], object]) -> None:
        """`work`, which writes, is begun, and nobody waits for it; ``TooMany`` if it is not."""
        self._start(work, is_write=True)

    def wait(self, timeout_s: float) -> bool:
        """Every write has ended; False if that took longer. A read that hangs keeps nobody."""
        return self._running.wait(timeout_s)

    def _start(self, work: Callable[[], T], is_write: bool) -> _Outcome[T]:
        running, outcome = self._running, _Outcome[T]()
        with running.changed:
            if running.number >= self._limit:
                raise TooMany
            running.number += 1
            running.num_writes += is_write

        def ended() -> None:
            with running.changed:
                running.number -= 1
                running.num_writes -= is_write
                running.changed.notify_all()

        def run() -> None:
            try:
                outcome.result = work()
            except BaseException as error:
                outcome.error = error
            finally:
                outcome.ended.set()
                ended()

        try:
            threading.Thread(target=run, name=f"kvloom {self._name}", daemon=True).start()
        except RuntimeError:  # no more threads, or Python is ending
            ended()
            raise TooMany from None
        return outcome
