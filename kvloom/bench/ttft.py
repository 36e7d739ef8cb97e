"""Time to first token: every method over the same prompt, part by part, beside what the arithmetic allows.

Runs take turns: transformers' own `generate`, full prefill in kvloom, and each method at each ratio over
chunks from memory. Chunks from a disk store, whose files the machine's page cache holds, are timed with the
methods that take no ratio and at the middle ratio only, since loading is all that differs. The machine's
rates are sampled after every round.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from kvloom.bench.bound import Shapes, compare, first_token, forward
from kvloom.bench.measure import (
    account,
    disk_store,
    fitting,
    in_turns,
    own_attention,
    ratio,
    spread,
    timed,
    transformers_generate,
)
from kvloom.bench.rates import Rates
from kvloom.bench.texts import prompt_of
from kvloom.errors import MethodError
from kvloom.registry import did_you_mean
from kvloom.selectors import selectors
from kvloom.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvloom.bench.bound import Work
    from kvloom.loom import Loom
    from kvloom.prompt import Prompt
    from kvloom.selectors import Selector

TRANSFORMERS = "transformers"
"""Not a method of kvloom: the model's own `generate`, up to the first token."""

METHODS = (TRANSFORMERS, "full", "none", "infoflow", "cacheblend", "epic")
RATIOS = (0.05, 0.15, 0.3)
LENGTHS = (1024, 2048, 4096, 7168)

PARTS = ("load", "splice", "score", "recompute")
"""Parts that have a bound; "rest" is what is left of the time to first token, choosing the token included."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One line of the table: a method, where its chunks are; `selector` None is transformers."""

    selector: Selector | None
    from_disk: bool = False

    @property
    def name(self) -> str:
        return TRANSFORMERS if self.selector is None else self.selector.name

    @property
    def ratio(self) -> float | None:
        """The share of rows that is computed again, where the method has the choice."""
        return self.selector.ratio if self.selector is not None and takes_ratio(type(self.selector)) else None

    @property
    def chunks(self) -> str | None:
        """ "ram" or "disk"; None where none is read."""
        if self.selector is None or not self.selector.reuses:
            return None
        return "disk" if self.from_disk else "ram"

    def __str__(self) -> str:
        return f"{self.name} {self.ratio} {self.chunks}"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One run."""

    seconds: float
    trace: Trace


def takes_ratio(method: type[Selector]) -> bool:
    """Whether the share of rows is an option of the method."""
    return any(field.name == "ratio" and field.init for field in fields(method))


def ways(methods: Sequence[str], ratios: Sequence[float]) -> list[Way]:
    """Every line to measure. Raises ``MethodError`` for an unknown method or a ratio out of range."""
    for name in methods:
        known = {TRANSFORMERS: None} | dict.fromkeys(selectors)
        if name not in known:
            raise MethodError(f"unknown method {name!r}{did_you_mean(name, known)}")
    found: list[Way] = []
    for name in dict.fromkeys(methods):
        if name == TRANSFORMERS:
            found.append(Way(selector=None))
            continue
        shares = sorted(set(ratios)) if takes_ratio(selectors[name]) else [None]
        built = [selectors.build(name, {} if share is None else {"ratio": share}) for share in shares]
        found += [Way(selector=selector) for selector in built]
        if built[0].reuses:
            found.append(Way(selector=built[len(built) // 2], from_disk=True))
    return found


def run(
    name: str,
    loom: Loom,
    *,
    lengths: Sequence[int] = LENGTHS,
    methods: Sequence[str] = METHODS,
    ratios: Sequence[float] = RATIOS,
    repeats: int = 3,
    chunk_tokens: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
    on_length: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Measures every way at every length that fits the model, as data for JSON; docs/benchmarks.md describes
    it. `on_length` gets what there is after each length.
    """
    every = ways(methods, ratios)
    fit, skipped = fitting(lengths, loom.decoder.max_length, 1)
    prompts = [prompt_of(loom, length, chunk_tokens) for length in fit]
    shapes, rates = Shapes.of(loom.decoder), Rates(loom.decoder)
    found = account(
        name,
        loom,
        "ttft",
        methods=list(methods),
        ratios=list(ratios),
        repeats=repeats,
        chunk_tokens=chunk_tokens,
    )
    found |= {"skipped": skipped, "rates": {}, "results": []}
    for place, (length, prompt) in enumerate(zip(fit, prompts, strict=True)):
        rates.clear()

        def progress(done: int, total: int, place: int = place) -> None:
            if on_progress is not None:
                on_progress(place * total + done, len(fit) * total)

        with disk_store() as url:
            taken = _take(loom, loom.twin(store=url), prompt, every, repeats, shapes, rates, progress)
        found["results"] += _lines(length, prompt, taken, shapes, rates)
        found["rates"][str(length)] = rates.as_dict()
        if on_length is not None:
            on_length(found)
    return found


def _take(
    loom: Loom,
    on_disk: Loom,
    prompt: Prompt,
    every: Sequence[Way],
    repeats: int,
    shapes: Shapes,
    rates: Rates,
    on_progress: Callable[[int, int], None],
) -> dict[Way, list[Taken]]:
    """Each way's runs, in turns; the rates are sampled for the numbers of rows that the ways computed."""
    by_name = {str(way): way for way in every}

    def runner(way: Way) -> Callable[[], Taken]:
        return lambda: _once(on_disk if way.from_disk else loom, prompt, way.selector)

    counts: set[int] = {1}

    def between(number: int, found: Mapping[str, Taken]) -> None:
        if number == 0:  # the stores were filled and the kernels chosen in it
            for way_name, taken in found.items():
                works = _works(shapes, by_name[way_name], prompt, taken.trace).values()
                counts.update(work.rows for work in works if work.flops)
        rates.sample(counts if number else ())
        if number == 0:
            rates.clear()

    taken = in_turns({str(way): runner(way) for way in every}, repeats, between, on_progress)
    return {by_name[way_name]: each for way_name, each in taken.items()}


def _once(loom: Loom, prompt: Prompt, selector: Selector | None) -> Taken:
    """One first token: the id is known, on this side of the device, when the clock stops."""
    decoder, trace = loom.decoder, Trace()
    if selector is None:
        ids = prompt.token_ids.to(decoder.device)
        with own_attention(decoder):
            seconds = timed(decoder, lambda: transformers_generate(decoder, ids, 1))
        trace.rows, trace.seconds.recompute = list(range(len(prompt.context_ids))), seconds
        return Taken(seconds=seconds, trace=trace)

    def work() -> None:
        _, logits = loom.prepare(prompt, selector, trace=trace)
        int(logits.argmax())

    return Taken(seconds=timed(decoder, work), trace=trace)


def _works(shapes: Shapes, way: Way, prompt: Prompt, trace: Trace) -> dict[str, Work]:
    if way.selector is None:
        return {"recompute": forward(shapes, range(prompt.num_tokens))}
    recomputed = (len(trace.rows) + len(prompt.question_ids)) * shapes.num_layers
    return first_token(
        shapes,
        way.selector,
        prompt,
        trace.rows,
        from_disk=way.from_disk,
        is_scored=trace.token_layers > recomputed,
    )


def _lines(
    length: int, prompt: Prompt, taken: Mapping[Way, Sequence[Taken]], shapes: Shapes, rates: Rates
) -> list[dict[str, Any]]:
    """A line of results for each way."""
    full = next((runs for way, runs in taken.items() if way.name == "full"), None)
    whole = forward(shapes, range(prompt.num_tokens))
    lines = []
    for way, runs in taken.items():
        trace = runs[0].trace
        works = _works(shapes, way, prompt, trace)
        bounds = {part: work.seconds(rates) for part, work in works.items()}
        parts = {
            part: compare(median(run.trace.seconds[part] for run in runs), bounds[part])
            for part in PARTS
            if part in works
        }
        rest = median(run.seconds - sum(run.trace.seconds[part] for part in works) for run in runs)
        parts["rest"] = compare(rest, 0.0)
        seconds, bound_s = [run.seconds for run in runs], sum(bounds.values())
        lines.append(
            {
                "length": length,
                "method": way.name,
                "ratio": way.ratio,
                "chunks": way.chunks,
                "num_chunks": len(prompt.chunk_ids),
                "question_tokens": len(prompt.question_ids),
                "rows": len(trace.rows),
                "ttft_s": spread(seconds),
                "bound_s": bound_s,
                "quotient": median(seconds) / bound_s,
                "of_full": None if full is None else ratio(seconds, [run.seconds for run in full]),
                "bound_of_full": bound_s / whole.seconds(rates),
                "flops_of_full": sum(work.flops for work in works.values()) / whole.flops,
                "parts": parts,
                "work": {part: work.as_dict() for part, work in works.items()},
                "kv_bytes": shapes.kv_bytes(prompt.num_tokens),
            }
        )
    return lines
