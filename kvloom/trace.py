"""Trace: what an answer reused, repaired and cost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass
class Seconds:
    """Wall-clock seconds of each stage; a stage that did not run took 0."""

    load: float = 0.0  # waiting for chunks from the store; each lookup has what its own reading took
    prefill: float = 0.0  # computing chunks that the store did not have, and storing them
    splice: float = 0.0  # moving keys, copying values
    score: float = 0.0  # the selector's look at the cache, scoring pass included
    recompute: float = 0.0  # chosen rows and question; for full prefill, the whole prompt
    compress: float = 0.0  # scoring and dropping rows of the prompt
    first_token: float = 0.0  # from logits to the first token
    decode: float = 0.0  # all further tokens

    def __getitem__(self, stage: str) -> float:
        return asdict(self)[stage]

    @property
    def ttft(self) -> float:
        """Time to first token: every stage but decode."""
        return sum(asdict(self).values()) - self.decode

    @contextmanager
    def clock(self, stage: str, synchronize: Callable[[], None]) -> Iterator[None]:
        """Adds the seconds spent inside to `stage`, device work included."""
        start = time.perf_counter()
        try:
            yield
            synchronize()
        finally:
            setattr(self, stage, getattr(self, stage) + time.perf_counter() - start)


@dataclass
class Trace:
    """What was reused, what was computed, and how long it took; filled in as an answer is made."""

    method: str = ""  # the exact recipe: repr of the selector
    context_tokens: int = 0  # header and chunks
    question_tokens: int = 0
    new_tokens: int = 0  # generated
    reused_tokens: int = 0  # context tokens whose KV came from the store
    prefilled_tokens: int = 0  # context tokens of chunks that the store did not have
    lookups: list[dict[str, Any]] = field(
        default_factory=list
    )  # of header and chunks in the store: hit or why not
    recomputed_rows: int = 0  # context rows computed again, the question not counted
    rows: list[int] = field(default_factory=list)  # which ones, of the context as read; of full prefill, all
    token_layers: int = (
        0  # rows x layers computed for this question: chosen rows, question, scoring and check layers
    )
    kv_bytes: int = 0  # of the cache that answered, context and question
    chunk_order: list[int] = field(default_factory=list)  # chunks as read, when they were reordered
    compressions: list[dict[str, Any]] = field(
        default_factory=list
    )  # what each did; see `compressors.compress`
    finish_reason: str = ""  # "eos", "stop" or "length"
    seconds: Seconds = field(default_factory=Seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `rows` is as `as_ranges` writes it, and `seconds` gains "ttft"."""
        seconds = asdict(self.seconds) | {"ttft": self.seconds.ttft}
        return asdict(self) | {"rows": as_ranges(self.rows), "seconds": seconds}


def as_ranges(rows: Sequence[int]) -> str:
    """Ascending rows in short: ``[3, 4, 5, 9]`` as ``"3-5,9"``."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][1] + 1:
            runs[-1][1] = row
        else:
            runs.append([row, row])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_ranges(text: str) -> list[int]:
    """The rows that `as_ranges` wrote. Raises ``ValueError`` for another text."""
    rows: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        rows += range(int(first), int(last or first) + 1)
    return rows


@dataclass(frozen=True)
class Answer:
    """The text generated, its token ids (without the ending token), and the trace of how it came about."""

    text: str
    token_ids: list[int]
    trace: Trace
    continuation: Any = field(
        default=None, repr=False, compare=False
    )  # to go on after it; see `Loom.generate`
