"""Trace: what an answer reused, repaired and cost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Seconds:
    """Wall-clock seconds of each stage; a stage that did not run took 0."""

    load: float = 0.0  # reading chunks from the store
    prefill: float = 0.0  # computing chunks that the store did not have, and storing them
    splice: float = 0.0  # moving keys, copying values
    score: float = 0.0  # the selector's look at the cache, scoring pass included
    recompute: float = 0.0  # chosen rows and question; for full prefill, the whole prompt
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
    recomputed_rows: int = 0  # context rows computed again, the question not counted
    token_layers: int = (
        0  # rows x layers computed for this question: chosen rows, question, scoring and check layers
    )
    kv_bytes: int = 0  # of the cache that answered, context and question
    chunk_order: list[int] = field(default_factory=list)  # chunks as read, when they were reordered
    finish_reason: str = ""  # "eos", "stop" or "length"
    seconds: Seconds = field(default_factory=Seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `seconds` gains "ttft"."""
        return asdict(self) | {"seconds": asdict(self.seconds) | {"ttft": self.seconds.ttft}}


@dataclass(frozen=True)
class Answer:
    """The text generated, its token ids (without the ending token), and the trace of how it came about."""

    text: str
    token_ids: list[int]
    trace: Trace
