"""verify: is reuse right on this model and these documents?

Three questions, from algebra to quality: do moved keys equal computed ones in every layer; does recomputing
every row give a full prefill; and how far from full prefill is each method's next-token distribution on the
user's questions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvloom.errors import MethodError, PromptError
from kvloom.profile import as_selector_for
from kvloom.prompt import Document, Prompt, as_document
from kvloom.retrieve import Retriever
from kvloom.selectors import Full, InfoFlow, NoRecompute, Selector
from kvloom.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvloom.cache import SplicedCache
    from kvloom.loom import Loom

EXACT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of logits between recompute-all and full prefill that passes, by dtype."""


@dataclass(frozen=True)
class MethodReport:
    """How near one method comes to full prefill, over all questions."""

    method: str  # repr of the selector
    name: str
    ratio: float
    mean_kl: float  # nats, KL(full || method) of the next token's distribution
    worst_kl: float
    top1_agreement: float  # share of questions whose most likely next token is that of full prefill
    mean_rows: float  # context rows recomputed
    mean_ttft_ratio: float  # time to first token over that of full prefill, both in this run


@dataclass(frozen=True)
class Report:
    """The verdict on a model and its documents; `sentence` says it in words."""

    model: str
    num_questions: int
    mean_context_tokens: float
    rotation_errors: list[float]  # per layer, relative
    moved_keys_error: float  # largest relative difference of layer-0 keys, spliced against full prefill
    recompute_all_error: float  # largest relative difference of logits
    methods: list[MethodReport]
    judged: str  # repr of the selector that the pass mark is about
    max_kl: float
    min_top1: float
    passed: bool
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def verify(
    loom: Loom,
    questions: Sequence[str],
    documents: Sequence[Document | str],
    *,
    selector: Selector | str = "infoflow",
    ratios: Sequence[float] = (0.05, 0.15, 0.3),
    top: int = 8,
    max_kl: float = 0.25,
    min_top1: float = 0.8,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Measures the selector, InfoFlow at `ratios` and no recompute against full prefill on every question.

    The pass mark: recompute-all equals full prefill, and the selector's mean KL is at most `max_kl` nats with
    at least `min_top1` of the questions agreeing on the next token. Each question reads its `top` best
    documents by BM25. Raises ``PromptError`` without questions.
    """
    if isinstance(questions, str):
        raise PromptError("questions must be a list; put the one question into brackets")
    if not questions:
        raise PromptError("verify needs at least one question; give one with --question")
    if loom.chunk_compressor is not None:
        raise MethodError(
            "verify compares with chunks that hold every row; make a Loom without chunk_compressor for it"
        )
    judged = as_selector_for(loom.decoder, selector)
    methods = list(dict.fromkeys([NoRecompute(), *(InfoFlow(ratio=ratio) for ratio in ratios), judged]))
    documents = [as_document(document) for document in documents]
    retriever = Retriever(documents)
    seen: dict[Selector, list[_Seen]] = {method: [] for method in methods}
    moved_error, exact_error, lengths = 0.0, 0.0, []
    for done, question in enumerate(questions):
        prompt = loom.prompt(question, [documents[i] for i in sorted(retriever.top(question, top))])
        lengths.append(len(prompt.context_ids))
        trace = Trace()
        full_cache, full = loom.prepare(prompt, Full(), trace=trace)
        cache = loom.splice(prompt)
        moved_error = max(moved_error, _moved_keys_error(cache, full_cache))
        exact_error = max(exact_error, _recompute_all_error(loom, prompt, cache, full))
        for method in methods:
            seen[method].append(_look(loom, prompt, method, full, trace.seconds.ttft))
        if on_progress is not None:
            on_progress(done + 1, len(questions))
    reports = {method: _report(method, looks) for method, looks in seen.items()}
    is_exact = max(moved_error, exact_error) <= EXACT.get(loom.decoder.dtype, max(EXACT.values()))
    verdict = reports[judged]
    is_near = verdict.mean_kl <= max_kl and verdict.top1_agreement >= min_top1
    return Report(
        model=loom.decoder.name,
        num_questions=len(questions),
        mean_context_tokens=sum(lengths) / len(lengths),
        rotation_errors=loom.rotation_errors,
        moved_keys_error=moved_error,
        recompute_all_error=exact_error,
        methods=list(reports.values()),
        judged=repr(judged),
        max_kl=max_kl,
        min_top1=min_top1,
        passed=is_exact and is_near,
        sentence=_sentence(verdict, list(reports.values()), exact_error, is_exact, is_near, max_kl, min_top1),
    )


@dataclass(frozen=True)
class _Seen:
    kl: float
    agrees: bool
    rows: int
    ttft_ratio: float


def _moved_keys_error(cache: SplicedCache, full: SplicedCache) -> float:
    """Keys of layer 0 depend on their own token only, so every moved one must be that of a full prefill."""
    expected = full.keys(0)[:, : cache.num_rows].float()
    return float((cache.keys(0).float() - expected).abs().max() / expected.abs().max())


def _recompute_all_error(loom: Loom, prompt: Prompt, cache: SplicedCache, full: Tensor) -> float:
    """With every row of the spliced cache computed again but those that are exact as stored."""
    rows = (~cache.exact).nonzero().flatten()
    logits = loom.recompute(cache, rows, prompt)
    return float((logits - full).abs().max() / full.abs().max())


def _look(loom: Loom, prompt: Prompt, method: Selector, full: Tensor, full_s: float) -> _Seen:
    if not method.reuses:
        return _Seen(0.0, True, len(prompt.context_ids), 1.0)
    trace = Trace()
    _, logits = loom.prepare(prompt, method, trace=trace)
    trace.seconds.prefill = 0.0  # a cold chunk is the index's cost, not the method's
    agrees = bool(logits.argmax() == full.argmax())
    return _Seen(kl_divergence(full, logits), agrees, trace.recomputed_rows, trace.seconds.ttft / full_s)


def kl_divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats of two next-token distributions given as logits (V,)."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))


def _report(method: Selector, looks: list[_Seen]) -> MethodReport:
    count = len(looks)
    return MethodReport(
        method=repr(method),
        name=method.name,
        ratio=method.ratio,
        mean_kl=sum(look.kl for look in looks) / count,
        worst_kl=max(look.kl for look in looks),
        top1_agreement=sum(look.agrees for look in looks) / count,
        mean_rows=sum(look.rows for look in looks) / count,
        mean_ttft_ratio=sum(look.ttft_ratio for look in looks) / count,
    )


def _sentence(
    verdict: MethodReport,
    reports: list[MethodReport],
    exact_error: float,
    is_exact: bool,
    is_near: bool,
    max_kl: float,
    min_top1: float,
) -> str:
    untouched = reports[0]
    if not is_exact:
        return (
            "Do not reuse chunks with this model: what should equal a full prefill (moved keys, and every "
            "row "
            f"recomputed) differs from it by {exact_error:.1e}, so something in it is not as kvloom assumes."
        )
    figures = (
        f"{verdict.name} at {verdict.ratio:.0%} stays {verdict.mean_kl:.3f} nats from full prefill and "
        f"agrees on the next token in {verdict.top1_agreement:.0%} of the questions (no recompute: "
        f"{untouched.mean_kl:.3f} nats, {untouched.top1_agreement:.0%})"
    )
    if is_near:
        return f"Reuse is right on this model and these documents: {figures}."
    near = [report for report in reports if report.mean_kl <= max_kl and report.top1_agreement >= min_top1]
    found = [f"{report.name} at {report.ratio:.0%} meets it" for report in near[:1]]
    advice = found[0] if found else "none of the ratios measured meets it: try higher ones"
    return (
        f"Reuse is exact where it claims to be, but {figures}; the pass mark is {max_kl:g} nats "
        f"and {min_top1:.0%}: {advice}, or use full prefill for these documents."
    )
