"""Decoding: milliseconds a token behind a context, beside transformers' `generate` with its dynamic and its
static cache.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from kvloom.bench.bound import Shapes, step_seconds
from kvloom.bench.measure import (
    account,
    fitting,
    in_turns,
    own_attention,
    ratio,
    spread,
    transformers_generate,
)
from kvloom.bench.rates import Rates
from kvloom.bench.texts import prompt_of
from kvloom.generate import Sampling, generate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder
    from kvloom.loom import Loom

LENGTHS = (512, 1024, 2048, 4096)
WARM_UP = 2
"""Tokens of each run that are not counted."""


def run(
    name: str,
    loom: Loom,
    *,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
    steps: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures `steps` tokens after a context of every length that fits, each way, as data for JSON."""
    num_new = WARM_UP + steps + 1
    fit, skipped = fitting(lengths, loom.decoder.max_length, num_new)
    prompts = [prompt_of(loom, length, 512) for length in fit]
    shapes, rates = Shapes.of(loom.decoder), Rates(loom.decoder)
    found = account(name, loom, "decode", repeats=repeats, steps=steps)
    found |= {"skipped": skipped, "rates": {}, "results": []}
    for place, (length, prompt) in enumerate(zip(fit, prompts, strict=True)):
        rates.clear()

        def progress(done: int, total: int, place: int = place) -> None:
            if on_progress is not None:
                on_progress(place * total + done, len(fit) * total)

        cache, logits = loom.full_prefill(prompt, reserve=num_new)
        ids = prompt.token_ids.to(loom.decoder.device)
        runs = {
            "kvloom": lambda cache=cache, logits=logits: ours(loom.decoder, cache, logits, num_new),
            "dynamic": lambda ids=ids: theirs(loom.decoder, ids, num_new, "dynamic"),
            "static": lambda ids=ids: theirs(loom.decoder, ids, num_new, "static"),
        }
        taken = in_turns(runs, repeats, lambda number, _: rates.sample([1]) if number else None, progress)
        middle = length + WARM_UP + steps // 2
        bound_ms = 1000 * step_seconds(shapes, middle, rates)
        for way, ms in taken.items():
            found["results"].append(
                {
                    "length": length,
                    "method": way,
                    "ms": spread(ms),
                    "bound_ms": bound_ms,
                    "quotient": median(ms) / bound_ms,
                    "of_dynamic": ratio(ms, taken["dynamic"]),
                    "read_bytes": shapes.weight_bytes + shapes.kv_bytes(middle),
                    "kv_bytes": shapes.kv_bytes(length),
                }
            )
        found["rates"][str(length)] = rates.as_dict()
    return found


def ours(decoder: Decoder, cache: SplicedCache, logits: Tensor, num_new: int) -> float:
    """The median milliseconds between tokens of kvloom's own loop; the cache is as before afterwards."""
    num_rows = cache.num_rows
    tokens = generate(decoder, cache, logits, Sampling(max_new_tokens=num_new), frozenset())
    times = [time.perf_counter() for _ in tokens]  # a token is a number here, so the device is done
    cache.truncate(num_rows)
    return _median_gap(times)


class _Clock:
    """A streamer of `generate`: notes when each token is known."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing."""


def theirs(decoder: Decoder, ids: Tensor, num_new: int, kind: str) -> float:
    """The median milliseconds between tokens of transformers' `generate` after ids (T,), with its cache of
    this kind.
    """
    clock = _Clock()
    with own_attention(decoder):
        transformers_generate(decoder, ids, num_new, streamer=clock, cache_implementation=kind)
    return _median_gap(clock.times[1:])  # the first is the prompt


def _median_gap(times: Sequence[float]) -> float:
    assert len(times) > WARM_UP + 1, "the answer was cut short"
    return 1000 * median(after - before for before, after in list(pairwise(times))[WARM_UP:])
