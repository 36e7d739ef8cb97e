"""The seam in the hands of a user who calls the model without kvloom."""

from __future__ import annotations

import threading

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from tiny_models import DOCUMENTS, FAMILIES, FLOAT32, QUESTION, build, difference, loom_of
from transformers import AttentionInterface, AttentionMaskInterface

from kvloom.cache import CACHE_ARGUMENT
from kvloom.errors import UnsupportedModel
from kvloom.hf import ATTENTION
from kvloom.loom import Loom


def test_attention_and_mask_are_both_registered() -> None:
    assert ATTENTION in AttentionInterface()
    assert ATTENTION in AttentionMaskInterface()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_the_models_own_calls_keep_their_results(family: str) -> None:
    """Batches with left padding, a cache in several steps, and generate, against eager attention."""
    plain, switched = build(FAMILIES[family]), build(FAMILIES[family])
    Loom(switched, ByteTokenizer())
    assert switched.config._attn_implementation == ATTENTION
    ids = torch.arange(3, 3 + 40).view(2, 20)
    padding = torch.ones_like(ids)
    padding[1, :6] = 0
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids), padding):
            expected = plain(input_ids=ids, attention_mask=mask).logits[:, -1]
            assert difference(switched(input_ids=ids, attention_mask=mask).logits[:, -1], expected) < FLOAT32
        caches = []
        for model in (plain, switched):
            first = model(input_ids=ids[:, :12], use_cache=True)
            caches.append(
                model(input_ids=ids[:, 12:], use_cache=True, **{CACHE_ARGUMENT: first[CACHE_ARGUMENT]}).logits
            )
        assert difference(caches[1], caches[0]) < FLOAT32
        made = [
            model.generate(
                input_ids=ids, attention_mask=padding, max_new_tokens=5, do_sample=False, pad_token_id=0
            )
            for model in (plain, switched)
        ]
        assert torch.equal(made[0], made[1])
        static = switched.generate(
            input_ids=ids[:1],
            max_new_tokens=5,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
        assert torch.equal(static, made[0][:1])


def test_truncated_view_shares_weights_and_leaves_the_model_whole(llama_loom: Loom) -> None:
    decoder = llama_loom.decoder
    view = decoder._truncated(2)
    assert len(view.layers) == 2
    assert len(decoder.body.layers) == 3
    assert view.layers[1].mlp.up_proj.weight is decoder.body.layers[1].mlp.up_proj.weight


def test_two_threads_do_not_share_state(llama_loom: Loom) -> None:
    questions = [f"{QUESTION} {number}?" for number in range(6)]
    alone = {q: llama_loom.answer(q, DOCUMENTS, max_new_tokens=4).token_ids for q in questions}
    together: dict[str, list[int]] = {}

    def ask(question: str) -> None:
        together[question] = llama_loom.answer(question, DOCUMENTS, max_new_tokens=4).token_ids

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_model_that_was_switched_to_another_attention_is_refused_before_it_stores_wrong_kv() -> None:
    loom = loom_of("llama")
    loom.model.set_attn_implementation("sdpa")
    for act in (lambda: loom.index(DOCUMENTS), lambda: loom.answer(QUESTION, DOCUMENTS)):
        with pytest.raises(UnsupportedModel, match="switched to 'sdpa' attention after kvloom took it"):
            act()
    assert list(loom.store.keys()) == []
