"""Everything that commands print: data on stdout, remarks and progress on stderr."""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import typer

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.progress import Progress

PATIENCE_S = 1.0
"""Work that is done sooner shows no bar."""

PLAIN_WIDTH = 100
"""Columns of tables that do not go to a terminal."""


def echo_json(value: Any) -> None:
    """One JSON value on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def remark(text: str) -> None:
    """One line on stderr."""
    typer.echo(f"kvloom: {text}", err=True)


def console() -> Console:
    """A rich console on stdout, of a fixed width where that is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def size(num_bytes: int) -> str:
    """``1234567`` as ``1.2 MB``."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """``1 chunk``, ``2,000 chunks``; for nouns that take an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Remarks(logging.Handler):
    """Log records as remarks, each different one once; to whatever stderr is at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text not in self._said:
            self._said.add(text)
            remark(text)


class Activity:
    """A context manager: a bar on stderr while the work inside takes over a second; only on a terminal.

    Call `update(done, total)` as the work proceeds; until then the bar only moves. `done` and `total` stay
    readable.
    """

    def __init__(self, what: str) -> None:
        self.done = self.total = 0
        self._what = what
        self._bar: Progress | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._bar is not None:
                self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """The bar stands at `done` of `total`."""
        with self._lock:
            self.done, self.total = done, total
            self._draw()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with self._lock:
            if self._ended:
                return
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=None)
            self._draw()
            self._bar.start()

    def _draw(self) -> None:
        if self._bar is not None and self.total:
            self._bar.update(self._bar.task_ids[0], completed=self.done, total=self.total)
