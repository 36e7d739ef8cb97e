"""Recall: answers over a compressed prompt, its question unseen or seen when it was compressed.

unseen  The context (header and documents) is prefilled and compressed; the question is run over what is left.
        So is a cache used that was made before anyone asked, for documents that many questions are about.
seen    Context and question are prefilled and compressed, the question's rows protected and in the window.
        Its last token, the template's, is held back and run over what is left, so that the answer's first
        token too is predicted without what was dropped.

All is against the uncompressed cache of the same prompt: its logits over the gold answer, teacher-forced. One
JSON line for each sample, way, method and share. Kept places and bytes are those of the cache that answers,
the question's rows among them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import kvloom
from kvloom.compressors import compress
from kvloom.errors import ContextTooLong, EvalError, MethodError
from kvloom.eval import metrics
from kvloom.eval.benchmark import digest
from kvloom.eval.continuations import fork, fork_observer
from kvloom.eval.fidelity import contenders, together
from kvloom.eval.journal import versions
from kvloom.eval.runner import Run
from kvloom.generate import AnswerStream, Sampling
from kvloom.observe import Observer, Records
from kvloom.registry import did_you_mean
from kvloom.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.eval.benchmark import Benchmark, Sample
    from kvloom.eval.fidelity import Contender
    from kvloom.loom import Loom

KEEPS = (0.2, 0.4)
METHODS = ("infokv", "snapkv:kernel=9", "random", "streaming", "keydiff", "expected_attention")
WAYS = ("unseen", "seen")
KEY = ("benchmark", "sample", "question", "method", "keep")


@dataclass(frozen=True, kw_only=True)
class RecallRecipe:
    """All that decides the numbers of a run, timings aside."""

    model: str
    benchmarks: list[str]  # repr of each
    limit: int | None
    questions: list[str]  # ways
    methods: list[str]  # labels
    keeps: list[float]
    max_new_tokens: int  # of greedy answers; 0: none are generated
    max_context: int | None
    prompt_format: str
    fingerprint: str
    data: dict[str, str]  # digest of each benchmark's samples
    kvloom_version: str = kvloom.__version__
    versions: dict[str, str] = field(default_factory=versions)


def check_ways(ways: Sequence[str]) -> None:
    """Raises ``MethodError`` for an unknown way to ask, or one named twice."""
    for way in ways:
        if way not in WAYS:
            raise MethodError(f"unknown way to ask {way!r}{did_you_mean(way, dict.fromkeys(WAYS))}")
    if len(set(ways)) < len(ways):
        raise MethodError(f"a way to ask is named twice: {', '.join(ways)}")


def check_baseline(baseline: str | None, methods: Sequence[str]) -> None:
    """Raises ``MethodError`` for a baseline that is none of the methods."""
    if baseline is not None and baseline not in methods:
        raise MethodError(f"the baseline {baseline!r} is none of the methods: {', '.join(methods)}")


def make_recipe(
    loom: Loom,
    model: str,
    benchmarks: Sequence[Benchmark],
    samples: Sequence[Sequence[Sample]],
    **asked: Any,
) -> RecallRecipe:
    """The recipe of a run over the samples taken from the benchmarks; `asked` are its other fields."""
    return RecallRecipe(
        model=model,
        benchmarks=[repr(benchmark) for benchmark in benchmarks],
        prompt_format=repr(loom.prompt_format),
        fingerprint=loom.decoder.fingerprint,
        data={b.name: digest(taken) for b, taken in zip(benchmarks, samples, strict=True)},
        **asked,
    )


def run(
    loom: Loom,
    benchmarks: Sequence[Benchmark],
    samples: Sequence[Sequence[Sample]],
    recipe: RecallRecipe,
    folder: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Fills the folder with what is not there yet; `on_progress(done, total)` counts results.

    Raises ``EvalError`` when no sample fits the model.
    """
    journal, every = Run(folder, recipe, KEY), contenders(recipe.methods, recipe.keeps)
    pairs = [(b.name, sample) for b, taken in zip(benchmarks, samples, strict=True) for sample in taken]
    total = len(pairs) * len(every) * len(recipe.questions)
    for name, sample in pairs:
        for way in recipe.questions:
            missing = [c for c in every if (name, sample.id, way, c.label, c.keep) not in journal.done]
            if not missing or (name, sample.id) in journal.skipped:
                continue
            try:
                for line in measure(loom, sample, way, missing, recipe):
                    journal.write({"benchmark": name, **line})
                    if on_progress is not None:
                        on_progress(len(journal.done), total)
            except ContextTooLong as error:
                journal.skip(name, sample.id, str(error))
    if not journal.done:
        raise EvalError(
            f"none of {len(pairs)} samples fits the model's context or --max-context; nothing was measured"
        )
    return journal


@dataclass(frozen=True, eq=False)
class _Asked:
    """A prompt whose uncompressed cache has been asked."""

    context_ids: Tensor  # (T,)
    question_ids: Tensor  # (Q,)
    gold: Tensor  # (A,)
    answers: tuple[str, ...]
    max_new_tokens: int

    def split(self, way: str) -> tuple[Tensor, Tensor]:
        """What is prefilled and compressed, (T,), and what is run over what is left of it."""
        if way == "unseen":
            return self.context_ids, self.question_ids
        whole = torch.cat([self.context_ids, self.question_ids])
        return whole[:-1], whole[-1:]


def measure(
    loom: Loom, sample: Sample, way: str, contenders: Sequence[Contender], recipe: RecallRecipe
) -> Iterator[dict[str, Any]]:
    """The result lines of one sample; it is prefilled once for all that want no contrary records.

    Raises ``ContextTooLong`` before any work.
    """
    prompt = loom.prompt(sample.question, sample.documents)
    gold = torch.tensor(loom.tokenizer.encode(sample.answers[0]))
    asked = _Asked(prompt.context_ids, prompt.question_ids, gold, sample.answers, recipe.max_new_tokens)
    if recipe.max_context is not None and len(asked.context_ids) > recipe.max_context:
        raise ContextTooLong(
            f"context has {len(asked.context_ids):,} tokens, the run takes {recipe.max_context:,} "
            "(--max-context)"
        )
    loom.check_length(prompt, max(len(gold), recipe.max_new_tokens))
    full: dict[str, Any] = {}
    reference: Tensor | None = None
    for records, members in together(contenders):
        cache, observer, seconds = _prefilled(loom, asked, way, records)
        if reference is None:
            reference, full = _full_answer(loom, asked, fork(loom.decoder, cache), way)
        for member in members:
            yield {
                "sample": sample.id,
                "kind": sample.kind,
                "question": way,
                "context_tokens": len(asked.context_ids),
                "question_tokens": len(asked.question_ids),
                "num_gold": len(gold),
                "prefill_s": seconds,
                **_compressed(loom, asked, way, member, fork(loom.decoder, cache), observer, reference),
                **{f"full_{name}": value for name, value in full.items()},
            }


def _prefilled(loom: Loom, asked: _Asked, way: str, records: Records) -> tuple[SplicedCache, Observer, float]:
    """The cache before compression: of the context, and of a seen question too; and the seconds it took."""
    ids, _ = asked.split(way)
    cache = loom.decoder.new_cache(len(ids))
    observer = Observer(loom.decoder, cache, records)
    start = time.perf_counter()
    observer.run(ids)
    loom.decoder.synchronize()
    return cache, observer, time.perf_counter() - start


def _full_answer(loom: Loom, asked: _Asked, cache: SplicedCache, way: str) -> tuple[Tensor, dict[str, Any]]:
    """The reference: logits over the gold answer (A, V), and what the uncompressed cache answers."""
    logits = _gold_logits(loom, asked, cache, way)
    nll = float(metrics.nll_per_token(logits, asked.gold).mean())
    return logits, {"nll": nll, "bytes": cache.num_bytes, **_answered(loom, asked, cache, logits[0])}


def _compressed(
    loom: Loom,
    asked: _Asked,
    way: str,
    member: Contender,
    cache: SplicedCache,
    observer: Observer,
    reference: Tensor,
) -> dict[str, Any]:
    """What one method makes of the cache, which it compresses, and how far answers over that are off."""
    protect = [range(len(asked.context_ids), cache.num_rows)]  # what there is of the question
    start = time.perf_counter()
    done = compress(member.compressor, cache, fork_observer(observer, cache), protect=protect)
    loom.decoder.synchronize()
    seconds = time.perf_counter() - start
    logits = _gold_logits(loom, asked, cache, way)
    kl = metrics.kl_per_token(reference, logits)
    return {
        "method": member.label,
        "keep": member.keep,
        "name": member.compressor.name,
        "recipe": done.method,
        "options": asdict(member.compressor),
        "kept": [layer.length for layer in cache.layers],
        "bytes": cache.num_bytes,
        "compress_s": seconds,
        "note": done.note,
        "kl": float(kl.mean()),
        "first_kl": float(kl[0]),
        "nll": float(metrics.nll_per_token(logits, asked.gold).mean()),
        "agreement": metrics.agreement(reference, logits),
        **_answered(loom, asked, cache, logits[0]),
    }


def _gold_logits(loom: Loom, asked: _Asked, cache: SplicedCache, way: str) -> Tensor:
    """(A, V) float32 logits that predict each gold token (A,); all of the question is in the cache then."""
    decoder, gold, (_, rest) = loom.decoder, asked.gold, asked.split(way)
    positions = cache.next_position + torch.arange(len(rest))
    first = decoder.forward(rest, positions, cache, num_new=len(rest))[None]
    with cache.untouched():
        later = decoder.follow(gold[:-1], cache) if len(gold) > 1 else first[:0]
    return torch.cat([first, later])


def _answered(loom: Loom, asked: _Asked, cache: SplicedCache, first: Tensor) -> dict[str, Any]:
    """The greedy answer and its marks; nothing where none is asked for."""
    if not asked.max_new_tokens:
        return {}
    sampling = Sampling(max_new_tokens=asked.max_new_tokens)
    stream = AnswerStream(loom.decoder, loom.tokenizer, cache, first, sampling, Trace())
    text = "".join(stream).strip()
    return {
        "text": text,
        "f1": metrics.token_f1(text, asked.answers),
        "exact_match": metrics.exact_match(text, asked.answers),
        "contains": metrics.contains(text, asked.answers),
    }
