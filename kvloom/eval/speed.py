"""Speed: what compressing a prompt costs and what it saves, measured on one prompt.

Decode steps over the full and the compressed cache take turns, so that whatever else the machine does falls
on both. Each prefill is timed `ROUNDS` times, with and without what the compressor has recorded, in turns
too. Medians throughout. On a CPU the seconds are a trend; bytes are exact.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kvloom.compressors import compress
from kvloom.eval.continuations import fork, fork_observer
from kvloom.observe import Observer, Records

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.compressors import Compressor
    from kvloom.hf import Decoder
    from kvloom.loom import Loom

ROUNDS = 3
"""Prefills of each kind."""

WARM_UP = 2
"""Steps that are not counted: the first ones allocate."""


class _Timed(Observer):
    """An observer that adds up the seconds which the language-model head takes for the entropy."""

    head_s = 0.0

    def _entropies(self, states: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        found = super()._entropies(states)
        self.decoder.synchronize()
        self.head_s += time.perf_counter() - start
        return found


def measure_speed(loom: Loom, ids: Tensor, compressor: Compressor, steps: int) -> dict[str, Any]:
    """What compressing the prompt (T,) costs, and `steps` decode steps over either cache, as data for JSON.

    prefill_s            the prompt, nothing recorded
    record_s             what recording adds to that, the language-model head apart; may come out below 0
    head_s               of the head over all tokens, for the entropy
    compress_s           scoring and dropping
    share, share_less_head  all that compressing costs of the prefill, with and without the head
    peak_bytes           most memory held at once while scoring and dropping, beyond what was held before
    full_ms, compressed_ms  of one decode step
    """
    decoder = loom.decoder
    plain, recorded, heads, compressing = [], [], [], []
    full, small, peak = None, None, 0
    for _ in range(ROUNDS):
        full, observer, seconds = _prefill(decoder, ids, Records(), steps)
        plain.append(seconds - observer.head_s)
        small, observer, seconds = _prefill(decoder, ids, compressor.records, steps)
        recorded.append(seconds - observer.head_s)
        heads.append(observer.head_s)
        peak = _peak(decoder, small, observer, compressor)
        start = time.perf_counter()
        compress(compressor, small, observer)
        decoder.synchronize()
        compressing.append(time.perf_counter() - start)
    assert full is not None
    assert small is not None
    full_ms, compressed_ms = _steps(decoder, [full, small], int(ids[-1]), steps)
    prefill, record = median(plain), median(recorded) - median(plain)
    cost = record + median(compressing)
    return {
        "prefill_s": prefill,
        "record_s": record,
        "head_s": median(heads),
        "compress_s": median(compressing),
        "share": (cost + median(heads)) / prefill,
        "share_less_head": cost / prefill,
        "peak_bytes": peak,
        "steps": steps,
        "full_ms": full_ms,
        "compressed_ms": compressed_ms,
        "full_bytes": full.num_bytes,
        "compressed_bytes": small.num_bytes,
    }


def _prefill(
    decoder: Decoder, ids: Tensor, records: Records, steps: int
) -> tuple[SplicedCache, _Timed, float]:
    cache = decoder.new_cache(len(ids) + steps + WARM_UP)
    observer = _Timed(decoder, cache, records)
    start = time.perf_counter()
    observer.run(ids)
    decoder.synchronize()
    return cache, observer, time.perf_counter() - start


def _peak(decoder: Decoder, cache: SplicedCache, observer: Observer, compressor: Compressor) -> int:
    """Bytes, of a compression of a copy, which is made inside so that what is freed of it counts."""

    def work() -> None:
        twin = fork(decoder, cache)
        compress(compressor, twin, fork_observer(observer, twin))

    return peak_memory(work, decoder.device) - cache.num_bytes


def peak_memory(work: Callable[[], Any], device: torch.device) -> int:
    """Most bytes of tensors held at once while `work` runs, beyond those held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    held = peak = 0
    recorded: Any = profile.profiler  # torch's own types lack what it recorded of memory
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _steps(decoder: Decoder, caches: list[SplicedCache], token: int, steps: int) -> list[float]:
    """Median milliseconds of a decode step over each cache, in turns; the caches grow by the steps."""
    taken: list[list[float]] = [[] for _ in caches]
    for step in range(-WARM_UP, steps):
        for place in range(len(caches)) if step % 2 else reversed(range(len(caches))):
            cache = caches[place]
            position = torch.tensor([cache.next_position])
            start = time.perf_counter()
            decoder.forward(torch.tensor([token]), position, cache, num_new=1)
            decoder.synchronize()
            if step >= 0:
                taken[place].append(1000 * (time.perf_counter() - start))
    return [median(times) for times in taken]
