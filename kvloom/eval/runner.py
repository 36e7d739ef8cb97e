"""Runner: every method on every sample, one JSON line each, resumable.

A run is a folder: ``run.json`` holds the recipe (what was asked, versions, a digest of the data),
``results.jsonl`` a line per sample and method, ``skipped.jsonl`` the samples that do not fit the model. A run
that was interrupted goes on where it stopped; a folder made by another recipe is refused.

Full prefill is computed once per sample, as the reference: its logits over the gold answer, teacher-forced,
are what the others are compared with. Methods take turns sample by sample, all on the same token ids, with
every chunk in the store.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import kvloom
from kvloom.compressors import Compressor, as_compressor
from kvloom.errors import ContextTooLong, EvalError, MethodError
from kvloom.eval import metrics
from kvloom.eval.benchmark import Benchmark, Sample, as_passages, digest, joined
from kvloom.eval.journal import Journal, append_line, read_lines, versions
from kvloom.generate import AnswerStream, Sampling
from kvloom.selectors import Full, Selector, as_selector
from kvloom.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.answer_options import Reorder
    from kvloom.cache import SplicedCache
    from kvloom.loom import Loom
    from kvloom.prompt import Prompt


@dataclass(frozen=True)
class Method:
    """A selector, whether the documents are reordered by it, and what compresses the chunks before they are
    stored; `label` is how it was written.
    """

    label: str
    selector: Selector
    reorder: Reorder = False
    chunk_compressor: Compressor | None = None

    @classmethod
    def parse(cls, text: str) -> Method:
        """From ``NAME[:OPTION=VALUE,...][@COMPRESSOR[:OPTION=VALUE,...]]``; ``reorder=true`` or
        ``reorder=chunks`` is the runner's own.

        A comma separates options only where NAME= follows, so that ``layers=17,18`` stays one value.
        """
        written, at, compressor = text.partition("@")
        name, options = split_method(written, text)
        wish = options.pop("reorder", "false")
        choices: dict[str, Reorder] = {"false": False, "true": True, "chunks": "chunks"}
        if wish not in choices:
            raise MethodError(f"method {text!r}: reorder is true, false or chunks, not {wish!r}")
        selector = as_selector(name, options)
        if not at:
            return cls(text, selector, choices[wish])
        if not selector.reuses:
            raise MethodError(f"method {text!r}: {name} takes no chunk from the store, so none is compressed")
        return cls(text, selector, choices[wish], as_compressor(*split_method(compressor, text)))

    @property
    def recipe(self) -> str:
        """The exact recipe, for the record."""
        compressed = "" if self.chunk_compressor is None else f" @ {self.chunk_compressor!r}"
        return repr(self.selector) + (f" reorder={self.reorder}" if self.reorder else "") + compressed

    def over(self, loom: Loom) -> Loom:
        """The loom, with chunks compressed as this method wants them."""
        return loom if self.chunk_compressor is None else loom.twin(chunk_compressor=self.chunk_compressor)


def split_method(text: str, whole: str | None = None) -> tuple[str, dict[str, str]]:
    """Name and options of ``NAME`` or ``NAME:OPTION=VALUE,...``; raises ``MethodError``, naming the `whole`
    that the text is part of, for anything else.

    A comma separates options only where NAME= follows, so that ``layers=17,18`` stays one value.
    """
    name, _, options = text.partition(":")
    found: dict[str, str] = {}
    for part in re.split(r",(?=\w+=)", options) if options else []:
        option, equals, value = part.partition("=")
        if not equals:
            raise MethodError(f"{whole or text!r}: {part!r} is not of the form OPTION=VALUE")
        found[option] = value
    return name, found


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides the numbers of a run, timings aside."""

    model: str
    methods: list[str]
    benchmarks: list[str]  # repr of each
    limit: int | None
    chunks: str  # "passages" or "fixed"
    prompt_format: str
    max_new_tokens: int  # of greedy answers; 0: none are generated
    max_context: int | None = None  # tokens; samples with a longer context are skipped
    fingerprint: str
    data: dict[str, str]  # digest of each benchmark's samples
    kvloom_version: str = kvloom.__version__
    versions: dict[str, str] = field(default_factory=versions)


@dataclass(frozen=True)
class Result:
    """One method on one sample. KL, NLL and agreement are over the gold answer's tokens, teacher-forced."""

    benchmark: str
    sample: str
    kind: str
    method: str  # label
    recipe: str
    kl: float  # nats per token, KL(full prefill || this), mean over the gold answer
    first_kl: float  # nats, of the first answer token
    nll: float  # nats per token of the gold answer
    agreement: float  # share of gold positions where the likeliest token is full prefill's
    num_gold: int
    trace: dict[str, Any]
    text: str = ""
    f1: float | None = None
    exact_match: float | None = None
    contains: float | None = None  # 1 if the greedy answer contains a gold one
    rope_similarity: float | None = None  # of the recomputed rows to the question; None where there is none


class Run(Journal):
    """A folder of results, made by one recipe. Raises ``EvalError`` for a folder made by another."""

    def __init__(
        self, folder: Path, recipe: Any, key: Sequence[str] = ("benchmark", "sample", "method")
    ) -> None:
        super().__init__(folder, recipe, key)
        self._skipped = folder / "skipped.jsonl"
        self.skipped = {(line["benchmark"], line["sample"]) for line in read_lines(self._skipped)}

    def add(self, result: Result) -> None:
        """Appends a line and flushes it, so that an interrupted run loses nothing that is finished."""
        self.write(asdict(result))

    def skip(self, benchmark: str, sample: str, reason: str) -> None:
        """Records a sample that cannot be run."""
        if (benchmark, sample) not in self.skipped:
            self.skipped.add((benchmark, sample))
            append_line(self._skipped, {"benchmark": benchmark, "sample": sample, "reason": reason})


def make_recipe(
    loom: Loom,
    model: str,
    benchmarks: Sequence[Benchmark],
    samples: Sequence[Sequence[Sample]],
    methods: Sequence[Method],
    *,
    limit: int | None = None,
    chunks: str = "passages",
    max_new_tokens: int = 0,
    max_context: int | None = None,
) -> Recipe:
    """The recipe of a run over the samples taken from the benchmarks."""
    if chunks not in ("passages", "fixed"):
        raise MethodError(f"chunks must be passages or fixed, got {chunks!r}")
    labels = [method.label for method in methods]
    if len(set(labels)) < len(labels):
        raise MethodError(f"a method is given twice: {', '.join(labels)}")
    return Recipe(
        model=model,
        methods=labels,
        benchmarks=[repr(benchmark) for benchmark in benchmarks],
        limit=limit,
        chunks=chunks,
        prompt_format=repr(loom.prompt_format),
        max_new_tokens=max_new_tokens,
        max_context=max_context,
        fingerprint=loom.decoder.fingerprint,
        data={b.name: digest(taken) for b, taken in zip(benchmarks, samples, strict=True)},
    )


def run(
    loom: Loom,
    benchmarks: Sequence[Benchmark],
    samples: Sequence[Sequence[Sample]],
    methods: Sequence[Method],
    run: Run,
    recipe: Recipe,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills the run: what is done already is left as it is. Raises ``EvalError`` when no sample fits the
    model.
    """
    pairs = [(b, sample) for b, taken in zip(benchmarks, samples, strict=True) for sample in taken]
    for number, (benchmark, sample) in enumerate(pairs):
        if on_progress is not None:
            on_progress(number, len(pairs))
        if (benchmark.name, sample.id) in run.skipped:
            continue
        missing = [m for m in methods if (benchmark.name, sample.id, m.label) not in run.done]
        if not missing:
            continue
        try:
            for result in look(loom, benchmark, sample, missing, recipe):
                run.add(result)
        except ContextTooLong as error:
            run.skip(benchmark.name, sample.id, str(error))
    if on_progress is not None:
        on_progress(len(pairs), len(pairs))
    if not run.done:
        raise EvalError(
            f"none of {len(pairs)} samples fits the model's context or --max-context; nothing was measured"
        )


def look(
    loom: Loom,
    benchmark: Benchmark,
    sample: Sample,
    methods: Sequence[Method],
    recipe: Recipe,
) -> Iterator[Result]:
    """The results of the methods on one sample, after its chunks were indexed. Raises ``ContextTooLong``."""
    max_new_tokens = recipe.max_new_tokens
    documents = as_passages(sample) if recipe.chunks == "passages" else (joined(sample),)
    prompt = loom.prompt(sample.question, documents)
    num_context = len(prompt.context_ids)
    if recipe.max_context is not None and num_context > recipe.max_context:
        raise ContextTooLong(
            f"context has {num_context:,} tokens, the run takes {recipe.max_context:,} (--max-context)"
        )
    gold = torch.tensor(loom.tokenizer.encode(sample.answers[0]))
    reserve = max(len(gold), max_new_tokens)
    loom.check_length(prompt, reserve)
    for over in {method.chunk_compressor: method.over(loom) for method in methods}.values():
        # Without ids: what one compressor stores of a document would free what another has of it.
        over.index([replace(document, id=None) for document in documents])
    full_trace = Trace()
    full_cache, first = loom.prepare(prompt, Full(), reserve=reserve, trace=full_trace)
    reference = gold_logits(loom, full_cache, first, gold)
    for method in methods:
        if method.selector.reuses:
            trace = Trace()
            cache, first = method.over(loom).prepare(
                prompt, method.selector, reorder=method.reorder, reserve=reserve, trace=trace
            )
            logits = gold_logits(loom, cache, first, gold)
        else:
            trace, cache, logits = full_trace, full_cache, reference
        kl = metrics.kl_per_token(reference, logits)
        measured = {
            "kl": float(kl.mean()),
            "first_kl": float(kl[0]),
            "nll": float(metrics.nll_per_token(logits, gold).mean()),
            "agreement": metrics.agreement(reference, logits),
        }
        text = _greedy(loom, cache, logits[0], max_new_tokens, trace) if max_new_tokens else ""
        if max_new_tokens:
            measured["f1"] = metrics.token_f1(text, sample.answers)
            measured["exact_match"] = metrics.exact_match(text, sample.answers)
            measured["contains"] = metrics.contains(text, sample.answers)
        yield Result(
            benchmark=benchmark.name,
            sample=sample.id,
            kind=sample.kind,
            method=method.label,
            recipe=method.recipe,
            num_gold=len(gold),
            rope_similarity=_rope_similarity(loom, prompt, trace.rows),
            trace=trace.as_dict(),
            text=text,
            **measured,
        )


def gold_logits(loom: Loom, cache: SplicedCache, first: Tensor, gold: Tensor) -> Tensor:
    """(A, V) float32 logits that predict each gold token (A,), the cache left as it was."""
    with cache.untouched():
        rest = loom.decoder.follow(gold[:-1], cache) if len(gold) > 1 else first[:0].view(0, len(first))
    return torch.cat([first[None], rest.to(first.device)])


def _rope_similarity(loom: Loom, prompt: Prompt, rows: Sequence[int]) -> float | None:
    """The mean over rows and the question's tokens of the similarity of their rotations (the paper's Table 2,
    as far as its caption says).
    """
    if not rows:
        return None
    asked = torch.tensor(prompt.question_span) + len(prompt.context_ids)
    deltas = asked[:, None] - torch.tensor(rows)
    table = loom.decoder.rotary_similarity(torch.arange(prompt.num_tokens))
    return float(table[deltas].mean())


def _greedy(loom: Loom, cache: SplicedCache, first: Tensor, max_new_tokens: int, trace: Trace) -> str:
    stream = AnswerStream(
        loom.decoder, loom.tokenizer, cache, first, Sampling(max_new_tokens=max_new_tokens), trace
    )
    return "".join(stream).strip()
