from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.errors import PromptError
from kvloom.selectors import InfoFlow, NoRecompute
from kvloom.verify import kl_divergence

if TYPE_CHECKING:
    from kvloom.loom import Loom

QUESTIONS = [QUESTION, "What colour was the cloth?"]


def test_kl_by_hand() -> None:
    full, other = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    assert kl_divergence(full, other) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert kl_divergence(full + 3, full) == pytest.approx(0, abs=1e-7)


def test_report_measures_every_method_against_full_prefill() -> None:
    loom = loom_of("llama")
    report = loom.verify(
        QUESTIONS, DOCUMENTS, selector=InfoFlow(ratio=0.4), ratios=(0.15, 1.0), max_kl=1e9, min_top1=0
    )
    assert [method.method for method in report.methods] == [
        repr(m) for m in (NoRecompute(), InfoFlow(ratio=0.15), InfoFlow(ratio=1.0), InfoFlow(ratio=0.4))
    ]
    none, _, everything, _ = report.methods
    assert none.mean_kl > 1e-4
    assert none.mean_rows == 0
    assert everything.mean_kl < 1e-6
    assert everything.top1_agreement == 1
    assert max(report.recompute_all_error, report.moved_keys_error) < 1e-4
    assert max(report.rotation_errors) < 1e-4
    assert report.num_questions == 2
    assert report.passed
    assert report.sentence.startswith("Reuse is right on this model")
    assert report.as_dict()["methods"][0]["name"] == "none"


def test_the_pass_mark_can_be_missed() -> None:
    report = loom_of("llama").verify(QUESTIONS, DOCUMENTS, selector="none", max_kl=0)
    assert not report.passed
    assert "Reuse is exact where it claims to be, but none at 0%" in report.sentence
    assert "none of the ratios measured meets it: try higher ones, or use full prefill" in report.sentence
    nearer = loom_of("llama").verify(QUESTIONS, DOCUMENTS, selector="none", max_kl=1e-5, ratios=(0.1, 1.0))
    assert "infoflow at 100% meets it, or use full prefill" in nearer.sentence


def test_a_rotation_that_is_wrong_far_away_fails() -> None:
    """Right for the check at load time, wrong for the distances of a real prompt."""
    loom = loom_of("llama")
    true_rotation = loom.decoder.rotation
    loom.decoder.rotation = lambda delta: true_rotation(delta + (delta > 64))  # type: ignore[method-assign]
    report = loom.verify(QUESTIONS, DOCUMENTS, ratios=(), max_kl=1e9, min_top1=0)
    assert report.moved_keys_error > 0.1
    assert report.recompute_all_error < 1e-4
    assert not report.passed
    assert report.sentence.startswith("Do not reuse chunks with this model")


def test_values_that_are_not_as_computed_fail() -> None:
    loom = loom_of("llama")
    loom.index(DOCUMENTS)
    for key in list(loom.store.keys()):
        kv = loom.store.get(key)
        assert kv is not None
        kv.values[1].mul_(-1)
    report = loom.verify(QUESTIONS, DOCUMENTS, ratios=(), max_kl=1e9, min_top1=0)
    assert report.recompute_all_error > 1e-3
    assert not report.passed


def test_only_the_top_documents_are_read() -> None:
    report = loom_of("llama").verify([QUESTION], DOCUMENTS, ratios=(), top=1)
    assert report.mean_context_tokens < 80


def test_without_questions_there_is_nothing_to_verify(llama_loom: Loom) -> None:
    with pytest.raises(PromptError, match="at least one question"):
        llama_loom.verify([], DOCUMENTS)
    with pytest.raises(PromptError, match="must be a list"):
        llama_loom.verify("Who?", DOCUMENTS)
