from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.errors import MethodError
from kvloom.generate import Sampling, StopText

if TYPE_CHECKING:
    from kvloom.loom import Loom

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def test_greedy_takes_the_most_likely_token() -> None:
    assert Sampling().chooser()(LOGITS) == 1


def test_temperature_top_k_and_top_p_shape_the_distribution() -> None:
    def share(**options: float) -> list[float]:
        return [round(float(p), 3) for p in Sampling(temperature=1, **options)._probabilities(LOGITS)]

    assert share() == [0.089, 0.657, 0.242, 0.012]
    assert share(top_k=2) == [0, 0.731, 0.269, 0]
    assert [p > 0 for p in share(top_p=0.8)] == [False, True, True, False], "the token that crosses 0.8 stays"
    assert [p > 0 for p in share(top_p=1e-6)] == [False, True, False, False], "one token always stays"
    cold = Sampling(temperature=0.1)._probabilities(LOGITS)
    assert cold[1] > 0.99


def test_extreme_temperatures_and_masses_leave_the_best_token() -> None:
    for options in ({"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-320}):
        assert Sampling(**options, seed=0).chooser()(LOGITS) == 1


def test_a_seed_repeats_an_answer_and_other_seeds_differ(llama_loom: Loom) -> None:
    def sample(seed: int) -> list[int]:
        return llama_loom.answer(QUESTION, DOCUMENTS, temperature=2.0, seed=seed, max_new_tokens=8).token_ids

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0}, "top_p must lie above 0"),
        ({"stop": [""]}, "stop string must not be empty"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"seed": 2**70}, "seed must lie in"),
        ({"stop": [1]}, "stop must be a text or a list of texts"),
        ({"max_tokens": 5}, "did you mean 'max_new_tokens'"),
    ],
)
def test_bad_sampling_is_refused_before_any_work(llama_loom: Loom, options: dict, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        llama_loom.answer(QUESTION, DOCUMENTS, **options)


def test_the_stream_is_the_answer_in_pieces(llama_loom: Loom) -> None:
    stream = llama_loom.stream(QUESTION, DOCUMENTS, max_new_tokens=12)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.answer
    pieces = list(stream)
    answer = llama_loom.answer(QUESTION, DOCUMENTS, max_new_tokens=12)
    assert "".join(pieces) == stream.answer.text == answer.text
    assert stream.answer.token_ids == answer.token_ids
    assert all(pieces)


def test_generation_ends_at_any_end_token_and_says_why(llama_loom: Loom) -> None:
    free = llama_loom.answer(QUESTION, DOCUMENTS, max_new_tokens=8)
    assert (free.trace.finish_reason, free.trace.new_tokens, len(free.token_ids)) == ("length", 8, 8)
    third = free.token_ids[2]
    assert third not in free.token_ids[:2]
    loom = loom_of("llama")
    loom.model.generation_config.eos_token_id = [261, third]
    ended = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=8)
    assert ended.token_ids == free.token_ids[:2]
    assert ended.trace.finish_reason == "eos"
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = third
    assert (
        loom_of("llama", tokenizer=tokenizer).answer(QUESTION, DOCUMENTS, max_new_tokens=8).token_ids
        == free.token_ids[:2]
    )


def test_a_stop_string_cuts_the_text_before_it(llama_loom: Loom) -> None:
    free = llama_loom.answer(QUESTION, DOCUMENTS, max_new_tokens=12)
    stop = free.text[3:5]
    place = free.text.find(stop)
    stopped = llama_loom.answer(QUESTION, DOCUMENTS, max_new_tokens=12, stop=[stop, "never"])
    assert stopped.text == free.text[:place]
    assert stopped.trace.finish_reason == "stop"
    assert stopped.trace.new_tokens < 12


@given(st.text("ab.", max_size=12), st.lists(st.text("ab.", min_size=1, max_size=3), max_size=2), st.data())
def test_stop_text_shows_all_before_the_first_stop_string_however_it_is_cut(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown = StopText(tuple(stop))
    got = "".join(shown.feed(piece) for piece in pieces)
    ends = [text.find(s) for s in stop if s in text]
    if shown.stopped:
        assert any(got == text[: text.find(s)] for s in stop if s in text)
    else:
        assert not ends
        assert got + shown.flush() == text
