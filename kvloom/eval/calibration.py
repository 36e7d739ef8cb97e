"""Calibration: which layers' attention finds what a question is about, on one model.

The InfoFlow paper's Appendix B looks at needle prompts layer by layer on one model and takes the band 22-25
of its 40 layers, for that model and all others. Here every layer of the model at hand is scored alone, on
needle and on two-hop prompts over chunks spliced as in use, and the band of layers is searched whose mean
score, InfoFlow's own, ranks the hidden sentences highest. Every second sample has no part in the choice; the
default layers are kept unless the band is better on those beyond a bootstrap interval.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from datetime import date
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import kvloom
from kvloom.errors import MethodError
from kvloom.eval.hidden_facts import MIN_PIECES, PIECE_TOKENS, hidden_facts, prompt_of
from kvloom.eval.statistics import paired_difference
from kvloom.probe import Probe
from kvloom.profile import HeldOut, Profile, Scores
from kvloom.selectors import InfoFlow
from kvloom.selectors.infoflow import resolve_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvloom.loom import Loom
    from kvloom.prompt import Prompt

MIN_SAMPLES = 4
MIN_LENGTH = MIN_PIECES * PIECE_TOKENS
_EQUAL = 1e-9  # average precisions that differ by less are equal but for rounding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides a calibration's numbers, the text aside. Raises ``MethodError`` for a value out of
    range.
    """

    samples: int = 24  # of needle and of multi-hop prompts each
    length: int = 1000  # tokens of the documents, about
    ratio: float = 0.15  # of rows, at which recall is measured
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < MIN_SAMPLES:
            raise MethodError(f"calibration needs at least {MIN_SAMPLES} samples, got {self.samples}")
        if self.length < MIN_LENGTH:
            raise MethodError(f"length is a number of tokens and at least {MIN_LENGTH}, got {self.length}")
        if not 0 < self.ratio < 1:
            raise MethodError(f"ratio is a share of rows, above 0 and below 1, got {self.ratio}")


class Found(NamedTuple):
    """How well each band of layers finds the facts of prompts: [..., first layer, last layer], nan where the
    last is before the first.
    """

    ap: NDArray[np.float64]
    recall: NDArray[np.float64]


class Choice(NamedTuple):
    """The layers to score, why, and how well the candidates did on the held-out samples."""

    layers: str
    why: str
    held_out: HeldOut


def calibrate(
    loom: Loom, model: str, text: str, plan: Plan, *, on_progress: Callable[[int, int], None] | None = None
) -> Profile:
    """The profile of the loom's model, which `model` names for people, measured on prompts made from `text`.

    It is not saved; chunks of the prompts go to the loom's store.
    `on_progress(done, total)` counts prompts. Raises ``EvalError`` for a text that is too short, and
    ``MethodError`` for a length that the model does not take.
    """
    pairs = hidden_facts(text, loom.tokenizer, samples=plan.samples, length=plan.length, seed=plan.seed)
    prompts = [prompt_of(loom, hidden) for pair in pairs for hidden in pair]
    longest = max(prompt.num_tokens for prompt, _ in prompts)
    limit = loom.decoder.max_length
    if limit is not None and longest > limit:
        raise MethodError(
            f"prompts of length {plan.length:,} have up to {longest:,} tokens with header and question, "
            f"model takes {limit:,}; ask for a smaller length"
        )
    found = []
    for done, (prompt, gold) in enumerate(prompts):
        if on_progress is not None:
            on_progress(done, len(prompts))
        found.append(find(loom, prompt, gold, plan.ratio))
    if on_progress is not None:
        on_progress(len(prompts), len(prompts))
    # (samples, 2, L, L): needle, multi-hop
    both = Found(
        *(np.stack(values).reshape(len(pairs), 2, *values[0].shape) for values in zip(*found, strict=True))
    )
    num_layers = loom.decoder.num_layers
    choice = choose(both, seed=plan.seed)
    context_tokens = [len(prompt.context_ids) for prompt, _ in prompts]
    return Profile(
        model=model,
        fingerprint=loom.decoder.fingerprint,
        num_layers=num_layers,
        layers=choice.layers,
        why=choice.why,
        per_layer=[_scores(both, str(layer), layer, layer) for layer in range(num_layers)],
        held_out=choice.held_out,
        recipe={
            **asdict(plan),
            "text": hashlib.sha256(text.encode()).hexdigest(),
            "piece_tokens": PIECE_TOKENS,
            "mean_context_tokens": float(np.mean(context_tokens)),
            "reduction": InfoFlow.reduction,
            "query": InfoFlow.query,
        },
        kvloom_version=kvloom.__version__,
        date=date.today().isoformat(),
    )


def find(loom: Loom, prompt: Prompt, gold: Sequence[int], ratio: float) -> Found:
    """How well each band of layers ranks the `gold` rows of the prompt, among all that are not exact."""
    probe = Probe(loom.decoder, loom.splice(prompt), prompt.question_ids, prompt.question_span)
    scores = probe.reduced(InfoFlow.reduction, query=InfoFlow.query)[0].double().cpu().numpy()  # (L, T)
    is_candidate = ~probe.exact.cpu().numpy()
    is_gold = np.zeros(probe.num_rows, dtype=bool)
    is_gold[list(gold)] = True
    assert is_candidate[is_gold].all(), "facts stand in rows that are not exact"
    return rank(scores[:, is_candidate], is_gold[is_candidate], InfoFlow(ratio=ratio).budget(probe))


def rank(scores: NDArray[np.float64], is_gold: NDArray[np.bool_], num_rows: int) -> Found:
    """Average precision and recall among the best `num_rows`, of every band of layers, from the scores
    (L, C) of its layers and which of the rows are gold (C,).

    Rows rank by the sum over the band's layers, which is the order of their mean; ties go to the earlier row.
    """
    num_layers, num_candidates = scores.shape
    ap, recall = np.full((2, num_layers, num_layers), np.nan)
    places = np.arange(1, num_candidates + 1)
    for first in range(num_layers):
        bands = scores[first:].cumsum(0)  # (L - first, C): one for each last layer
        hits = is_gold[np.argsort(-bands, axis=1, kind="stable")]
        precision = hits.cumsum(1) / places
        ap[first, first:] = (precision * hits).sum(1) / is_gold.sum()
        recall[first, first:] = hits[:, :num_rows].sum(1) / is_gold.sum()
    return Found(ap, recall)


def choose(found: Found, *, seed: int) -> Choice:
    """The band that is best on the even samples, if it beats the default on the odd ones; else the default.

    `found` holds (samples, 2, L, L). The best band has the highest mean average precision over both kinds of
    prompt; of equals, the widest. Better means that the 95 % interval of the paired difference lies above 0.
    """
    num_layers = found.ap.shape[-1]
    means = found.ap[::2].mean((0, 1))  # (L, L)
    first, last = np.indices(means.shape)
    is_best = means >= np.nanmax(means) - _EQUAL
    place = int(np.argmax(np.where(is_best, last - first, -1)))
    best = (place // num_layers, place % num_layers)
    default, paper = (_ends(layers, num_layers) for layers in (str(InfoFlow.layers), "paper"))
    unseen = Found(found.ap[1::2], found.recall[1::2])
    pairs = unseen.ap.mean(1)  # (samples, L, L): needle and multi-hop prompts of a sample share their text
    gain = paired_difference(pairs[:, *best], pairs[:, *default], seed=seed)
    named = as_band(*best, num_layers)
    held_out = HeldOut(
        samples=len(pairs),
        best=_scores(unseen, named, *best),
        default=_scores(unseen, str(InfoFlow.layers), *default),
        paper=_scores(unseen, "paper", *paper),
        gain=gain.mean,
        low=gain.low,
        high=gain.high,
    )
    what = f"the band {named} (layers {best[0]} to {best[1]} of 0 to {num_layers - 1})"
    if best == default:
        return Choice(str(InfoFlow.layers), f"{what} is the best and the default", held_out)
    figures = (
        f"average precision {held_out.best.ap:.3f} against {held_out.default.ap:.3f}, difference "
        f"{gain.mean:+.3f}, 95 % interval {gain.low:+.3f} to {gain.high:+.3f}"
    )
    if gain.low > 0:
        why = f"{what} beats the default on samples that did not choose it"
        return Choice(named, f"{why}: {figures}", held_out)
    why = f"the default is kept, since {what} does not surely beat it on samples that did not choose the band"
    return Choice(str(InfoFlow.layers), f"{why}: {figures}", held_out)


def _ends(layers: str, num_layers: int) -> tuple[int, int]:
    """The first and the last layer of a band."""
    resolved = resolve_layers(layers, num_layers)
    return resolved[0], resolved[-1]


def as_band(first: int, last: int, num_layers: int) -> str:
    """The layers from `first` to `last` as InfoFlow's option has them: shares of the depth, in few digits."""
    wanted = tuple(range(first, last + 1))
    for scale in (10**digits for digits in range(1, 10)):
        # Rounded down, since a band begins and ends with the next whole layer.
        start, stop = (edge * scale // num_layers / scale for edge in (first, last + 1))
        band = f"{start:g}-{stop:g}"
        if start < stop and resolve_layers(band, num_layers) == wanted:
            return band
    raise AssertionError(f"no band of shares for layers {first} to {last} of {num_layers}")


def _scores(found: Found, layers: str, first: int, last: int) -> Scores:
    recall, ap = (values[..., first, last].mean(0) for values in (found.recall, found.ap))
    return Scores(
        layers=layers,
        needle_recall=float(recall[0]),
        needle_ap=float(ap[0]),
        multihop_recall=float(recall[1]),
        multihop_ap=float(ap[1]),
    )
