from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tiny_models import loom_of

from kvloom.errors import EvalError, MethodError
from kvloom.eval import calibration
from kvloom.eval.calibration import Found, Plan, as_band, calibrate, choose, find, rank
from kvloom.eval.hidden_facts import Hidden, hidden_facts, prompt_of
from kvloom.probe import Probe
from kvloom.profile import Profile
from kvloom.prompt import PromptFormat
from kvloom.selectors import InfoFlow, select
from kvloom.selectors.infoflow import resolve_layers
from kvloom.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.loom import Loom
    from kvloom.prompt import Prompt

TEXT = "\n\n".join(
    " ".join(f"Barge {10 * part + n} carried grey stone up the river {'again ' * n}today." for n in range(5))
    for part in range(12)
)
PLAN = Plan(samples=4, length=900, ratio=0.2)


def pairs_of(loom: Loom, samples: int = 4, seed: int = 0) -> list[tuple[Hidden, Hidden]]:
    return hidden_facts(TEXT, loom.tokenizer, samples=samples, length=900, seed=seed)


# --- the prompts


def test_facts_are_hidden_in_documents_behind_the_first(llama_loom: Loom) -> None:
    pairs = pairs_of(llama_loom, samples=6)
    assert len(pairs) == 6
    depths = []
    for needle, multihop in pairs:
        plain = [" ".join(part.split()) for part in TEXT.split("\n\n")]
        for hidden in (needle, multihop):
            homes = [[fact in document for document in hidden.documents].index(True) for fact in hidden.facts]
            assert min(homes) > 0
            assert len(set(homes)) == len(hidden.facts), "each in a document of its own"
            text = "\n\n".join(hidden.documents)
            for fact in hidden.facts:
                assert text.count(fact) == 1
                text = text.replace(f"{fact} ", "").replace(f" {fact}", "")
            assert all(sum(part in whole for whole in plain) for part in text.split("\n\n")), "else unchanged"
            assert 750 < len(text) <= 900, "bytes are this loom's tokens"
            assert max(len(document) for document in hidden.documents) < 330
        (city,) = re.findall(r"magic (\w+) number is \d{7}\.", needle.facts[0])
        assert needle.question == f"What is the special magic {city} number?"
        city, name = re.findall(r"number of (\w+) is held by (\w+ \w+)\.", multihop.facts[0])[0]
        assert re.fullmatch(rf"{name} holds the number \d{{7}}\.", multihop.facts[1])
        assert multihop.question == f"What is the special magic number of {city}?"
        assert not set(multihop.question.rstrip("?").split()) & set(name.split())
        assert needle.documents[0] == multihop.documents[0], "over the same text"
        rest = "\n\n".join(needle.documents[1:])
        depths.append(rest.index(needle.facts[0]) / len(rest))
    for half in (depths[::2], depths[1::2]):
        assert half == sorted(half)
        assert half[0] < 0.3 < half[1] < 0.6 < half[2]


def test_prompts_come_from_the_seed(llama_loom: Loom) -> None:
    pairs = pairs_of(llama_loom)
    assert pairs_of(llama_loom) == pairs
    assert pairs_of(llama_loom, samples=2)[0][1] == pairs[0][1]
    assert len({hidden for pair in pairs + pairs_of(llama_loom, seed=1) for hidden in pair}) == 16


class Words:
    """A tokenizer of words with the blank before them, as BPE has it, so that no fact begins at a token's
    edge; with `merges`, a full stop and the blank line behind it are one token.
    """

    def __init__(self, merges: bool) -> None:
        self.pattern = re.compile(r"\.\n\n| ?[^\s.]+|\.|\s" if merges else r" ?[^\s.]+|\.|\s")
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in self.pattern.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(list(self.ids)[token_id] for token_id in ids)


@pytest.mark.parametrize("tokenizer", [None, Words(merges=False), Words(merges=True)])
def test_gold_rows_are_the_tokens_of_the_facts(llama_loom: Loom, tokenizer: Words | None) -> None:
    loom: Any = llama_loom
    if tokenizer is not None:
        loom = SimpleNamespace(tokenizer=Tokenizer(tokenizer), prompt_format=PromptFormat())
        loom.prompt = lambda question, documents: prompt_on(loom, question, documents)
    for hidden in (hidden for pair in pairs_of(llama_loom) for hidden in pair):
        prompt, rows = prompt_of(loom, hidden)
        assert rows == sorted(set(rows))
        spelled = loom.tokenizer.decode(prompt.context_ids[rows].tolist())
        facts = sorted(hidden.facts, key="".join(hidden.documents).index)
        assert "".join(spelled.split()) == "".join("".join(facts).split())


def prompt_on(loom: Any, question: str, documents: Sequence[str]) -> Prompt:
    from kvloom.prompt import prompt

    return prompt(loom.tokenizer, loom.prompt_format, question, documents)


# --- ranks


def test_average_precision_and_recall_by_hand() -> None:
    scores = np.array([[0.9, 0.1, 0.5, 0.2], [0.0, 0.6, 0.1, 0.8]])
    found = rank(scores, np.array([True, False, False, True]), 2)
    # Layer 0 ranks 0 2 3 1: gold at places 1 and 3. Layer 1: 3 1 2 0, at 1 and 4. Both: 3 0 1 2, at 1 and 2.
    assert found.ap[0, 0] == pytest.approx((1 + 2 / 3) / 2)
    assert found.ap[1, 1] == pytest.approx((1 + 2 / 4) / 2)
    assert found.ap[0, 1] == 1
    assert (found.recall[0, 0], found.recall[1, 1], found.recall[0, 1]) == (0.5, 0.5, 1)
    assert np.isnan(found.ap[1, 0])
    tied = rank(np.zeros((1, 4)), np.array([False, True, False, False]), 1)
    assert (tied.ap[0, 0], tied.recall[0, 0]) == (0.5, 0), "ties go to the earlier row"


def test_recall_is_that_of_the_rows_that_infoflow_recomputes() -> None:
    loom = loom_of("llama")
    recalls = set()
    for hidden in (hidden for pair in pairs_of(loom) for hidden in pair):
        prompt, gold = prompt_of(loom, hidden)
        found = find(loom, prompt, gold, 0.2)
        for first, last in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (0, 2)):
            layers = ",".join(map(str, range(first, last + 1)))
            rows = loom.select(loom.splice(prompt), prompt, InfoFlow(ratio=0.2, layers=layers)).tolist()
            assert found.recall[first, last] == pytest.approx(len(set(rows) & set(gold)) / len(gold))
            recalls.add(found.recall[first, last])
    assert len(recalls) > 10


# --- the choice


def found_of(num_layers: int, perfect: int | None, samples: int = 12) -> Found:
    """Random scores, but for one layer whose highest rows are the gold ones. Its scores are small, so that no
    band with another layer is perfect too.
    """
    random = np.random.default_rng(0)
    found = []
    for _ in range(2 * samples):
        is_gold = np.arange(200) < 10
        random.shuffle(is_gold)
        scores = random.random((num_layers, 200))
        if perfect is not None:
            scores[perfect] = 1e-3 * (scores[perfect] + is_gold)
        found.append(rank(scores, is_gold, 20))
    return Found(
        *(np.stack(values).reshape(samples, 2, num_layers, num_layers) for values in zip(*found, strict=True))
    )


@pytest.mark.parametrize("perfect", [0, 1, 5, 11])
def test_the_one_layer_that_knows_is_chosen(perfect: int) -> None:
    choice = choose(found_of(12, perfect), seed=0)
    assert resolve_layers(choice.layers, 12) == (perfect,)
    held_out = choice.held_out
    assert held_out.best.layers == choice.layers
    assert (held_out.samples, held_out.best.ap, held_out.best.needle_recall) == (6, 1, 1)
    assert 0 < held_out.low <= held_out.gain <= held_out.high
    assert held_out.gain == pytest.approx(held_out.best.ap - held_out.default.ap)
    assert (
        f"(layers {perfect} to {perfect} of 0 to 11) beats the default on samples that did not" in choice.why
    )


def test_without_a_sure_gain_the_default_is_kept() -> None:
    choice = choose(found_of(12, None), seed=0)
    assert choice.layers == InfoFlow().layers == choice.held_out.default.layers
    assert choice.held_out.best.layers != choice.layers
    assert choice.held_out.low <= 0
    assert choice.why.startswith("the default is kept, since the band ")


def test_a_gain_that_chance_may_have_made_is_no_gain() -> None:
    ap = np.broadcast_to(np.where(np.triu(np.ones((8, 8))), 0.5, np.nan), (8, 2, 8, 8)).copy()
    ap[::2, :, 1, 1] = 0.9
    ap[1::2, :, 1, 1] = np.array([0.9, 0.2, 0.9, 0.2])[:, None]
    choice = choose(Found(ap, ap), seed=0)
    assert choice.held_out.low < 0 < choice.held_out.gain
    assert choice.layers == InfoFlow().layers
    ap[1::2, :, 1, 1] = np.array([0.9, 0.6, 0.9, 0.6])[:, None]
    assert resolve_layers(choose(Found(ap, ap), seed=0).layers, 8) == (1,)


def test_the_held_out_half_has_no_part_in_the_choice_and_the_last_word() -> None:
    """One layer knows everything, but on the even samples only."""
    knowing, ignorant = found_of(12, 1), found_of(12, None)
    odd = np.arange(12)[:, None, None, None] % 2 == 1
    found = Found(*(np.where(odd, lost, good) for lost, good in zip(ignorant, knowing, strict=True)))
    choice = choose(found, seed=0)
    assert resolve_layers(choice.held_out.best.layers, 12) == (1,)
    assert choice.held_out.best.ap < 0.2
    assert choice.layers == InfoFlow().layers


def test_of_equal_bands_the_widest() -> None:
    ap = np.where(np.triu(np.ones((8, 8))), 0.5, np.nan)
    ap[2, 3:6] = 1 - 1e-12 * np.arange(3)  # equal but for rounding
    ap[4, 5] = 1
    choice = choose(Found(*[np.broadcast_to(ap, (4, 2, 8, 8))] * 2), seed=0)
    assert resolve_layers(choice.layers, 8) == (2, 3, 4, 5)


def test_the_default_may_be_the_best_band_itself() -> None:
    ap = np.where(np.triu(np.ones((8, 8))), 0.5, np.nan)
    ap[2, 7] = 1
    choice = choose(Found(*[np.broadcast_to(ap, (4, 2, 8, 8))] * 2), seed=0)
    assert choice.layers == InfoFlow().layers
    assert choice.why == "the band 0.2-1 (layers 2 to 7 of 0 to 7) is the best and the default"


def test_every_band_has_a_short_name() -> None:
    for num_layers in (1, 2, 3, 7, 30, 36, 40, 61, 100):
        for first in range(num_layers):
            for last in range(first, num_layers):
                band = as_band(first, last, num_layers)
                assert resolve_layers(band, num_layers) == tuple(range(first, last + 1))
                assert len(band) <= 11
    assert as_band(12, 26, 30) == "0.4-0.9"
    assert as_band(0, 29, 30) == "0-1"
    assert as_band(22, 25, 40) == "0.55-0.65"


# --- all of it


def test_calibrate_finds_the_layer_that_was_made_to_know(
    llama_loom: Loom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 of three, which is not among the default layers."""

    def found(loom: Loom, prompt: Prompt, gold: list[int], ratio: float) -> Found:
        torch.manual_seed(sum(gold))
        scores = torch.rand(3, len(prompt.context_ids)).numpy()
        is_gold = np.isin(np.arange(scores.shape[1]), gold)
        scores[0] = 1e-3 * (scores[0] + is_gold)
        return rank(scores, is_gold, int(ratio * scores.shape[1]))

    monkeypatch.setattr(calibration, "find", found)
    profile = calibrate(llama_loom, "tiny", TEXT, replace(PLAN, samples=8))
    assert resolve_layers(profile.layers, 3) == (0,)
    assert [scores.ap == 1 for scores in profile.per_layer] == [True, False, False]


def test_a_calibration_says_what_it_measured() -> None:
    loom = loom_of("llama")
    steps: list[tuple[int, int]] = []
    profile = calibrate(loom, "tiny", TEXT, PLAN, on_progress=lambda *step: steps.append(step))
    assert steps == [(done, 8) for done in range(9)]
    assert (profile.model, profile.fingerprint, profile.num_layers) == ("tiny", loom.decoder.fingerprint, 3)
    assert [scores.layers for scores in profile.per_layer] == ["0", "1", "2"]
    assert profile.recipe["ratio"] == 0.2
    assert 900 < profile.recipe["mean_context_tokens"] < 1100
    prompts = [[prompt_of(loom, hidden) for hidden in pair] for pair in pairs_of(loom)]
    for layer, scores in enumerate(profile.per_layer):
        recalls = [[recall_of(loom, prompt, gold, str(layer)) for prompt, gold in pair] for pair in prompts]
        assert scores.needle_recall == pytest.approx(np.mean(recalls, 0)[0])
        assert scores.multihop_recall == pytest.approx(np.mean(recalls, 0)[1])
    best = [recall_of(loom, *pair[0], profile.held_out.best.layers) for pair in prompts[1::2]]
    assert profile.held_out.best.needle_recall == pytest.approx(np.mean(best))
    is_sure = profile.held_out.low > 0
    assert profile.layers == (profile.held_out.best if is_sure else profile.held_out.default).layers
    again = calibrate(loom_of("llama"), "tiny", TEXT, PLAN)
    assert replace(again, date=profile.date) == profile
    assert calibrate(loom, "tiny", TEXT + "!", PLAN).recipe["text"] != profile.recipe["text"]


def recall_of(loom: Loom, prompt: Prompt, gold: list[int], layers: str) -> float:
    probe = Probe(loom.decoder, loom.splice(prompt), prompt.question_ids, prompt.question_span)
    rows = select(InfoFlow(ratio=PLAN.ratio, layers=layers), probe).tolist()
    return len(set(rows) & set(gold)) / len(gold)


def test_a_calibration_is_what_named_infoflow_uses(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOOM_CACHE", str(tmp_path))
    loom = loom_of("llama")
    profile = calibrate(loom, "tiny", TEXT, PLAN)
    replace(profile, layers="0-0.1").save()
    assert Profile.load(loom.decoder.fingerprint) == replace(profile, layers="0-0.1")
    answer = loom.answer("Which barge?", ["Barge 7 is red."] * 3, options={"ratio": 0.3}, max_new_tokens=1)
    assert answer.trace.method == repr(InfoFlow(ratio=0.3, layers="0-0.1"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"samples": 3}, "calibration needs at least 4 samples, got 3"),
        ({"length": 749}, "length is a number of tokens and at least 750, got 749"),
        ({"ratio": 0.0}, "ratio is a share of rows, above 0 and below 1, got 0.0"),
        ({"ratio": 1.0}, "ratio is a share of rows, above 0 and below 1, got 1.0"),
        ({"ratio": float("nan")}, "ratio is a share of rows, above 0 and below 1, got nan"),
    ],
)
def test_plans_out_of_range(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MethodError) as caught:
        Plan(**wrong)
    assert str(caught.value) == sentence


def test_texts_and_models_that_will_not_do(llama_loom: Loom) -> None:
    def refused(text: str, kind: type[Exception], loom: Loom = llama_loom, **plan: Any) -> str:
        with pytest.raises(kind) as caught:
            calibrate(loom, "tiny", text, replace(PLAN, **plan))
        return str(caught.value)

    assert "the text has 14 tokens, prompts of 900 are asked for; give more text" in refused(
        " Some few words ", EvalError
    )
    assert "0 tokens" in refused(" \n" * 5000, EvalError)
    assert "make 0 documents where 3 are needed; give prose" in refused("word " * 5000, EvalError)
    sentence = refused(TEXT * 3, MethodError, length=2040)
    assert re.fullmatch(
        r"prompts of length 2,040 have up to 2,\d\d\d tokens with header and question, model takes 2,048; "
        "ask for a smaller length",
        sentence,
    )
    short = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=32))
    assert "chunk_tokens is 32, which cuts documents within a sentence" in refused(TEXT, MethodError, short)
