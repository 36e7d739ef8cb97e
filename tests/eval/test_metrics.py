"""Each metric on cases worked out by hand."""

from __future__ import annotations

from math import inf, log

import pytest
import torch

from kvloom.eval.metrics import (
    agreement,
    contains,
    exact_match,
    kl_per_token,
    nll_per_token,
    normalise,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown\nFOX!", "quick brown fox"),
        ("U.S. to-do", "us todo"),
        ("a an the", ""),
        ("Theatre, another ant", "theatre another ant"),
        ("the-end", "theend"),  # punctuation goes first
        ("", ""),
        ("Édith’s CAFÉ", "édith’s café"),  # noqa: RUF001  only ASCII punctuation is dropped
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "f1"),
    [
        ("Henry J. Kaiser", ["henry j kaiser"], 1),
        ("Kaiser", ["Henry J. Kaiser"], 0.5),  # precision 1, recall 1/3
        ("It was Henry Kaiser himself", ["Henry J. Kaiser"], 0.5),  # 2/5 and 2/3
        ("no no no", ["no"], 0.5),  # 1/3 and 1: a repeated word counts once
        ("no no yes", ["no no"], 0.8),  # 2/3 and 1
        ("the", ["the"], 0),  # nothing left
        ("", ["Ada"], 0),
        ("Ada", [""], 0),
        ("", [""], 0),
        ("Ada", ["Bob", "Ada Moss", "Ada"], 1),  # the best answer
        ("Ada\nQuestion: who", ["Ada"], 0.5),  # the whole prediction is judged
        ("July 5, 1942", ["July 5, 1942"], 1),  # and not cut at the comma
        ("édith", ["Édith"], 1),
    ],
)
def test_token_f1(prediction: str, answers: list[str], f1: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "answers", "matches", "holds"),
    [
        ("The Sarn.", ["sarn"], 1, 1),
        ("It is the Sarn, I think", ["sarn"], 0, 1),
        ("Sarn", ["Vell", "Sarn"], 1, 1),
        ("number 9512", ["512"], 0, 0),  # whole words
        ("number 512.", ["512"], 0, 1),
        ("4,710,263", ["4710263"], 1, 1),
        ("Moss Ada", ["Ada Moss"], 0, 0),
        ("", ["Ada"], 0, 0),
        ("the", ["a"], 0, 0),
        ("Ada", [""], 0, 0),
    ],
)
def test_exact_match_and_contains(prediction: str, answers: list[str], matches: float, holds: float) -> None:
    assert exact_match(prediction, answers) == matches
    assert contains(prediction, answers) == holds


def test_no_answer_is_refused() -> None:
    for metric in (token_f1, exact_match, contains):
        with pytest.raises(ValueError, match="no answer"):
            metric("Ada", [])


def test_kl_by_hand() -> None:
    full = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
    other = torch.tensor([[0.25, 0.25, 0.5], [0.75, 0.125, 0.125]]).log() + 7  # logits, not shares
    kl = kl_per_token(full, other)
    assert kl.dtype == torch.float64
    by_hand = [0.5 * log(2) - 0.25 * log(2), 0.5 * log(0.5 / 0.75) + 0.5 * log(4)]
    assert kl.tolist() == pytest.approx(by_hand, rel=1e-6)
    assert kl_per_token(other, full)[1] == inf  # the other way round, a token is excluded
    assert kl_per_token(full, full).tolist() == [0, 0]


def test_kl_is_exact_where_float32_is_not() -> None:
    full = torch.zeros(1, 1000)
    other = full.clone()
    other[0, 0] = 1e-5
    kl = kl_per_token(full, other)
    assert float(kl) == pytest.approx(0.5e-10 * (1e-3 - 1e-6), rel=1e-3)  # half the variance


def test_nll_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log() - 3
    nll = nll_per_token(logits, torch.tensor([1, 2]))
    assert nll.dtype == torch.float64
    assert nll.tolist() == pytest.approx([log(4), -log(0.8)], rel=1e-6)


def test_agreement_by_hand() -> None:
    full = torch.tensor([[1.0, 2.0], [5.0, 4.0], [0.0, 1.0], [3.0, 1.0]])
    other = torch.tensor([[0.0, 9.0], [1.0, 2.0], [0.0, 1.0], [3.0, 2.0]])
    assert agreement(full, other) == 0.75


def test_shapes_are_checked() -> None:
    logits = torch.zeros(3, 5)
    for measure in (kl_per_token, agreement):
        with pytest.raises(ValueError, match=r"\(3, 5\) and \(2, 5\)"):
            measure(logits, logits[:2])
        with pytest.raises(ValueError, match=r"must both be \(A, V\)"):
            measure(logits[0], logits[0])
    with pytest.raises(ValueError, match=r"\(3, 5\) must be \(A, V\) and ids \(2,\)"):
        nll_per_token(logits, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="no position"):
        agreement(logits[:0], logits[:0])
