"""Breaker: stops asking a place that does not answer, and tries again ever more rarely."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES = 3
COOL_DOWN_S = 1.0
LONGEST_S = 300.0


class Breaker:
    """Closed, every call is let through. After `failures` failures in a row it is open: none is, for
    `cool_down_s`. Then it is half-open: one call is let through, whose success closes it, and whose failure
    opens it for twice as long, up to `longest_s`. Safe in threads.
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        cool_down_s: float = COOL_DOWN_S,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.num_failures = 0  # in a row
        self._limit, self._first_s, self._longest_s = failures, cool_down_s, longest_s
        self._clock, self._on_change = clock, on_change
        self._cool_down_s = cool_down_s
        self._open_until: float | None = None
        self._era = 0  # counts changes: what a call from an earlier one reports is of no interest any more
        self._is_probing = False
        self._lock = threading.Lock()

    @property
    def state(self) -> str:
        """ "closed", "open" or "half-open"."""
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "open" if self._is_cooling() else "half-open"

    @property
    def retry_in_s(self) -> float:
        """Until a call is let through; 0 when it would be now."""
        with self._lock:
            return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    def admit(self) -> int | None:
        """A ticket for one call, to be given back with its outcome; None: not now."""
        with self._lock:
            if self._open_until is not None:
                if self._is_cooling() or self._is_probing:
                    return None
                self._is_probing = True
                self._era += 1  # the last calls from before it opened come too late
                self._on_change("half-open")
            return self._era

    def succeeded(self, ticket: int) -> None:
        """The call that had the ticket was answered."""
        with self._lock:
            if ticket != self._era:
                return
            self.num_failures = 0
            if self._open_until is not None:
                self._open_until, self._is_probing, self._cool_down_s = None, False, self._first_s
                self._era += 1
                self._on_change("closed")

    def failed(self, ticket: int) -> None:
        """The call that had the ticket was not answered, or too late."""
        with self._lock:
            if ticket != self._era:
                return
            self.num_failures += 1
            if self._open_until is not None:
                self._cool_down_s = min(2 * self._cool_down_s, self._longest_s)
            elif self.num_failures < self._limit:
                return
            self._open_until = self._clock() + self._cool_down_s
            self._is_probing = False
            self._era += 1
            self._on_change("open")

    def _is_cooling(self) -> bool:
        return self._open_until is not None and self._clock() < self._open_until
