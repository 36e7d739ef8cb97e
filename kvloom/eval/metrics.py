"""Metrics of an answer's text and of next-token distributions.

Texts are compared as LongBench's question-answering metric compares them, on the whole prediction: LongBench
cuts at the first line for few-shot sets only (trec, triviaqa, samsum, lsht), none of which is here, and what
the InfoFlow KV authors strip besides (prefixes, all from the first comma on) is not stripped.

Distributions come as logits over the answer's positions, shape letters A answer tokens, V vocabulary.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and the words a, an and the, one blank between words.

    Punctuation goes before articles and leaves no blank: ``U.S.`` becomes ``us``, ``to-do`` becomes ``todo``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(prediction: str, answers: Iterable[str]) -> float:
    """The best F1, 0..1, of the prediction's words and an answer's; a word counts as often as both have it.

    0 where either has no words left after normalisation.
    """
    return _best(_f1, prediction, answers)


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1 if the prediction is one of the answers after normalisation and has words left, else 0."""
    return _best(lambda found, gold: float(found == gold != ""), prediction, answers)


def contains(prediction: str, answers: Iterable[str]) -> float:
    """1 if an answer's words stand in the prediction one after the other, after normalisation, else 0.

    Whole words: 12 is not in 512.
    """
    return _best(lambda found, gold: float(gold != "" and f" {gold} " in f" {found} "), prediction, answers)


def _best(measure: Callable[[str, str], float], prediction: str, answers: Iterable[str]) -> float:
    golds = [normalise(answer) for answer in answers]
    if not golds:
        raise ValueError("there is no answer to compare the prediction with")
    found = normalise(prediction)
    return max(measure(found, gold) for gold in golds)


def _f1(found: str, gold: str) -> float:
    found_words, gold_words = found.split(), gold.split()
    num_common = (Counter(found_words) & Counter(gold_words)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(found_words), num_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def kl_per_token(full_logits: Tensor, other_logits: Tensor) -> Tensor:
    """KL(full || other) in nats at each position, (A,) float64, from logits (A, V); never below 0.

    Infinite where `other` excludes a token that `full` allows. Raises ``ValueError`` for differing shapes.
    """
    _check_logits(full_logits, other_logits)
    full, other = full_logits.double().log_softmax(-1), other_logits.double().log_softmax(-1)
    share = full.exp()
    terms = (share * (full - other)).masked_fill(share == 0, 0)  # 0 log 0 is 0, and not 0 times infinity
    return terms.sum(-1).clamp_min(0)  # rounding can leave it just below


def nll_per_token(logits: Tensor, ids: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each id (A,) int64 under its logits (A, V), as (A,) float64.

    Raises ``ValueError`` for shapes that do not fit.
    """
    if logits.ndim != 2 or ids.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} must be (A, V) and ids {tuple(ids.shape)} (A,)")
    return -logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def agreement(full_logits: Tensor, other_logits: Tensor) -> float:
    """Share of positions, 0..1, at which the likeliest token is the same; logits (A, V), A at least 1.

    Raises ``ValueError`` for differing shapes or no position.
    """
    _check_logits(full_logits, other_logits)
    if len(full_logits) == 0:
        raise ValueError("there is no position to compare at")
    return float((full_logits.argmax(-1) == other_logits.argmax(-1)).double().mean())


def _check_logits(full: Tensor, other: Tensor) -> None:
    if full.ndim != 2 or full.shape != other.shape:
        raise ValueError(f"logits must both be (A, V), got {tuple(full.shape)} and {tuple(other.shape)}")
