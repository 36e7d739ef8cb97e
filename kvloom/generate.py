"""Decoding from a SplicedCache: greedy and sampled tokens, and their text as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch
from torch import Tensor

from kvloom.errors import MethodError
from kvloom.registry import did_you_mean
from kvloom.tokenizer import StreamDecoder, Tokenizer
from kvloom.trace import Answer, Trace

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keyword arguments."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int | None
    stop: tuple[str, ...] | list[str] | str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy. `seed` makes a sampled answer repeatable."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: SamplingOptions) -> Sampling:
        """From keyword arguments; an unknown one is a ``MethodError`` that names the nearest."""
        for name in options:
            if name not in SamplingOptions.__annotations__:
                raise MethodError(
                    f"unknown option {name!r}{did_you_mean(name, SamplingOptions.__annotations__)}"
                )
        return cls(**options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            if not isinstance(getattr(self, name), int | None):
                raise MethodError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float):
                raise MethodError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not isinstance(self.stop, str | tuple | list) or not all(isinstance(t, str) for t in self.stop):
            raise MethodError(f"stop must be a text or a list of texts, got {self.stop!r}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise MethodError(f"seed must lie in 0..2^63-1, got {self.seed}")
        if self.max_new_tokens < 1:
            raise MethodError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise MethodError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise MethodError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise MethodError(f"top_p must lie above 0 and not above 1, got {self.top_p}")
        if any(not text for text in self.stop):
            raise MethodError("a stop string must not be empty")

    def chooser(self) -> Callable[[Tensor], int]:
        """A function from logits (V,) float32 to a token id, with its own random state."""
        if self.temperature == 0:
            return lambda logits: int(logits.argmax())
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return lambda logits: int(torch.multinomial(self._probabilities(logits), 1, generator=generator))

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits.cpu().double()
        logits = (logits - logits.max()) / self.temperature  # the largest is 0, however small the temperature
        ranked, order = logits.sort(descending=True, stable=True)
        if self.top_k is not None:
            ranked[self.top_k :] = -torch.inf
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # mass of the better ones; the best always stays
        probabilities[1:][before[1:] >= self.top_p] = 0
        return torch.zeros_like(probabilities).index_copy(0, order, probabilities)


def generate(
    decoder: Decoder,
    cache: SplicedCache,
    logits: Tensor,
    sampling: Sampling,
    eos_ids: frozenset[int],
    step: Callable[[int], Tensor] | None = None,
) -> Iterator[int]:
    """Token ids from the logits (V,) after the cache's last row on, up to an end token (not yielded) or the
    limit.

    Each token yielded is appended to the cache only when the next one is asked for, by `step` if given, which
    returns the logits (V,) after it.
    """
    choose = sampling.chooser()
    for remaining in range(sampling.max_new_tokens, 0, -1):
        token = choose(logits)
        if token in eos_ids:
            return
        yield token
        if remaining > 1:
            if step is not None:
                logits = step(token)
                continue
            position = torch.tensor([cache.next_position])
            logits = decoder.forward(torch.tensor([token]), position, cache, num_new=1)


class Continuation(Protocol):
    """What takes the tokens of an answer, and can go on after it."""

    def step(self, token: int) -> Tensor:
        """(V,) float32 logits after the token, which is appended to the cache."""
        ...

    def end(self, token_ids: list[int], trace: Trace) -> None:
        """Hears all tokens of the answer, the last of which may not be in the cache."""
        ...


class AnswerStream(Iterator[str]):
    """The pieces of an answer's text as they are decided; `answer` holds the whole once the pieces are
    through.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        cache: SplicedCache,
        logits: Tensor,
        sampling: Sampling,
        trace: Trace,
        continuation: Continuation | None = None,
    ) -> None:
        self.trace = trace
        self.cache = cache
        self.continuation = continuation
        self._decoder = decoder
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._done = False
        eos_ids = decoder.eos_ids.union(tokenizer.eos_ids)
        self._pieces = self._run(StreamDecoder(tokenizer), StopText(sampling.stop), logits, sampling, eos_ids)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        """The answer; only once the stream is at its end, else a ``RuntimeError``."""
        if not self._done:
            raise RuntimeError("the answer is not complete yet; iterate over the stream first")
        return Answer("".join(self._text), self._token_ids, self.trace, self.continuation)

    def finish(self) -> Answer:
        """The answer, after all of it was generated."""
        for _ in self:
            pass
        return self.answer

    def _run(
        self,
        decoded: StreamDecoder,
        shown: StopText,
        logits: Tensor,
        sampling: Sampling,
        eos_ids: frozenset[int],
    ) -> Iterator[str]:
        going_on = self.continuation
        step = None if going_on is None else going_on.step
        tokens = generate(self._decoder, self.cache, logits, sampling, eos_ids, step)
        while not shown.stopped:
            stage = "decode" if self._token_ids else "first_token"
            with self.trace.seconds.clock(stage, self._decoder.synchronize):
                token = next(tokens, None)
            if token is None:
                break
            self._token_ids.append(token)
            yield from self._show(shown.feed(decoded.feed(token)))
        if not shown.stopped:
            yield from self._show(shown.feed(decoded.flush()) + shown.flush())
        self.trace.new_tokens = len(self._token_ids)
        self.trace.finish_reason = (
            "stop"
            if shown.stopped
            else "length"
            if len(self._token_ids) == sampling.max_new_tokens
            else "eos"
        )
        if going_on is not None:
            going_on.end(self._token_ids, self.trace)
        self._done = True

    def _show(self, piece: str) -> Iterator[str]:
        if piece:
            self._text.append(piece)
            yield piece


class StopText:
    """Passes text through until a stop string appears; holds back what may be the beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.stopped = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text so far may be shown; nothing after a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [place for place in map(self._held.find, self.stop) if place >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self.stop), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text held back, when no more follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )
