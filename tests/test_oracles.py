"""What must hold exactly, on every supported family: the identities that say that reuse is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import DOCUMENTS, FLOAT32, QUESTION, difference

from kvloom.probe import Probe
from kvloom.recompute import recompute
from kvloom.selectors import InfoFlow

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache
    from kvloom.loom import Loom
    from kvloom.prompt import Prompt


@pytest.fixture
def prompt(family_loom: Loom) -> Prompt:
    return family_loom.prompt(QUESTION, DOCUMENTS)


def assert_equal_caches(got: SplicedCache, expected: SplicedCache, rows: slice = slice(None)) -> None:
    for layer in range(len(expected.layers)):
        assert difference(got.keys(layer)[:, rows], expected.keys(layer)[:, rows]) < FLOAT32, (
            f"keys of layer {layer}"
        )
        assert difference(got.values(layer)[:, rows], expected.values(layer)[:, rows]) < FLOAT32, (
            f"values of layer {layer}"
        )


def test_full_prefill_equals_the_models_own_forward(family_loom: Loom, prompt: Prompt) -> None:
    model, implementation = family_loom.model, family_loom.model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=prompt.token_ids[None]).logits[0, -1]
    model.set_attn_implementation(implementation)
    _, logits = family_loom.full_prefill(prompt)
    assert difference(logits, own) < FLOAT32


def test_recomputing_every_row_equals_full_prefill(family_loom: Loom, prompt: Prompt) -> None:
    full, expected = family_loom.full_prefill(prompt)
    cache = family_loom.splice(prompt)
    logits = family_loom.recompute(cache, torch.arange(cache.num_rows), prompt)
    assert difference(logits, expected) < FLOAT32
    assert_equal_caches(cache, full)
    assert torch.equal(cache.token_ids, full.token_ids)
    assert torch.equal(cache.positions, full.positions)


@pytest.mark.parametrize("order", [DOCUMENTS, [DOCUMENTS[2], *DOCUMENTS]])
def test_recomputing_all_but_the_first_chunk_equals_full_prefill(family_loom: Loom, order: list[str]) -> None:
    """Unlike recomputing every row, this fails when stored keys or values of the first chunk are wrong."""
    prompt = family_loom.prompt(QUESTION, order)
    full, expected = family_loom.full_prefill(prompt)
    cache = family_loom.splice(prompt)
    rows = torch.arange(prompt.spans[0].stop, cache.num_rows)
    assert difference(family_loom.recompute(cache, rows, prompt), expected) < FLOAT32
    assert_equal_caches(cache, full)


def test_one_chunk_without_recompute_equals_full_prefill(family_loom: Loom) -> None:
    prompt = family_loom.prompt(QUESTION, DOCUMENTS[2:3])
    full, expected = family_loom.full_prefill(prompt)
    cache = family_loom.splice(prompt)
    assert bool(cache.exact.all())
    assert difference(family_loom.recompute(cache, torch.arange(0), prompt), expected) < FLOAT32
    assert_equal_caches(cache, full)


def test_layer_0_is_exact_and_deeper_layers_are_not(family_loom: Loom, prompt: Prompt) -> None:
    full, _ = family_loom.full_prefill(prompt)
    cache = family_loom.splice(prompt)
    context = slice(0, cache.num_rows)
    assert difference(cache.keys(0), full.keys(0)[:, context]) < FLOAT32
    assert difference(cache.values(0), full.values(0)[:, context]) < FLOAT32
    assert difference(cache.values(2), full.values(2)[:, context]) > 100 * FLOAT32, (
        "the oracles could not fail"
    )


def test_first_chunk_is_exact_in_every_layer(family_loom: Loom, prompt: Prompt) -> None:
    full, _ = family_loom.full_prefill(prompt)
    cache = family_loom.splice(prompt)
    assert cache.exact.nonzero().flatten().tolist() == list(range(prompt.spans[0].stop))
    assert_equal_caches(cache, full, slice(0, prompt.spans[0].stop))


def test_moving_keys_equals_computing_them_there(family_loom: Loom) -> None:
    decoder = family_loom.decoder
    ids, places = torch.arange(40) + 60, torch.arange(40)
    here = decoder.new_cache(40)
    decoder.fill(ids, places, here, num_new=40)
    for delta in (1, 7, 333):
        there = decoder.new_cache(40)
        decoder.fill(ids, places + delta, there, num_new=40)
        for layer in range(decoder.num_layers):
            moved = here.keys(layer) @ decoder.rotation(delta)
            assert difference(moved, there.keys(layer)) < FLOAT32
            assert difference(moved @ decoder.rotation(-delta), here.keys(layer)) < FLOAT32
            assert difference(here.keys(layer), there.keys(layer)) > 100 * FLOAT32


def test_one_pass_over_rows_and_question_equals_two(family_loom: Loom, prompt: Prompt) -> None:
    rows = torch.arange(prompt.spans[1].start, prompt.spans[3].stop, 3)
    one, two = family_loom.splice(prompt), family_loom.splice(prompt)
    logits = family_loom.recompute(one, rows, prompt)
    assert recompute(family_loom.decoder, two, rows) is None
    assert difference(family_loom.recompute(two, torch.arange(0), prompt), logits) < FLOAT32
    assert_equal_caches(two, one)


def test_order_of_rows_does_not_matter(family_loom: Loom, prompt: Prompt) -> None:
    rows = torch.arange(prompt.spans[1].start, prompt.spans[3].stop, 2)
    up, down = family_loom.splice(prompt), family_loom.splice(prompt)
    logits = family_loom.recompute(up, rows, prompt)
    assert torch.equal(family_loom.recompute(down, rows.flip(0), prompt), logits)


def test_scoring_leaves_the_cache_bit_identical(family_loom: Loom, prompt: Prompt) -> None:
    cache = family_loom.splice(prompt)
    before = [(cache.keys(layer).clone(), cache.values(layer).clone()) for layer in range(len(cache.layers))]
    record = cache.token_ids.clone(), cache.positions.clone(), cache.next_position
    rows = family_loom.select(cache, prompt, InfoFlow(ratio=0.3))
    assert len(rows) == int(0.3 * cache.num_rows)
    assert cache.get_seq_length() == len(prompt.context_ids)
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(cache.keys(layer), keys)
        assert torch.equal(cache.values(layer), values)
    assert torch.equal(cache.token_ids, record[0])
    assert torch.equal(cache.positions, record[1])
    assert cache.next_position == record[2]


def test_attention_of_a_question_token_sums_to_one(family_loom: Loom, prompt: Prompt) -> None:
    """Over context and question; gpt-oss gives a part to its sinks. Checked on the context by the first
    token alone.
    """
    cache = family_loom.splice(prompt)
    suffix = torch.cat([prompt.question_ids[:1], prompt.question_ids])
    maps = Probe(family_loom.decoder, cache, suffix, range(1)).attention()
    for layer, attention in maps.items():
        assert attention.shape[-2:] == (1, cache.num_rows)
        assert attention.min() >= 0
        assert attention.sum(-1).max() <= 1 + 1e-5, f"layer {layer}"
        assert attention.sum(-1).min() > 0


def test_probe_sees_the_attention_of_the_models_own_eager_code(family_loom: Loom) -> None:
    """With one chunk the spliced cache is a full prefill's, so the model's own attention maps are the
    oracle.
    """
    prompt = family_loom.prompt(QUESTION, DOCUMENTS[:1])
    cache = family_loom.splice(prompt)
    maps = Probe(family_loom.decoder, cache, prompt.question_ids, prompt.question_span).attention(
        query="suffix"
    )
    model, implementation = family_loom.model, family_loom.model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=prompt.token_ids[None], output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    for layer, attention in maps.items():
        expected = own[layer][0, :, cache.num_rows :, : cache.num_rows]
        assert difference(attention.flatten(0, 1), expected) < FLOAT32, f"layer {layer}"


def test_a_missing_chunk_changes_no_other_chunk(family_loom: Loom, prompt: Prompt) -> None:
    family_loom.index(DOCUMENTS)
    whole = family_loom.splice(prompt)
    gone = family_loom.chunks.key(prompt.header_ids, prompt.chunk_ids[2])
    assert family_loom.store.delete(gone)
    repaired = family_loom.splice(prompt)
    assert gone in family_loom.store
    others = torch.tensor([row for span in (0, 1, 3) for row in prompt.spans[span]])
    for layer in range(len(whole.layers)):
        assert torch.equal(repaired.keys(layer)[:, others], whole.keys(layer)[:, others])
        assert torch.equal(repaired.values(layer)[:, others], whole.values(layer)[:, others])
    assert_equal_caches(repaired, whole)


def test_generate_kwargs_go_straight_into_the_models_generate(family_loom: Loom, prompt: Prompt) -> None:
    selector = InfoFlow(ratio=0.4)
    expected = family_loom.answer(QUESTION, DOCUMENTS, selector=selector, max_new_tokens=6).token_ids
    cache = family_loom.context(QUESTION, DOCUMENTS, selector=selector)
    made = family_loom.model.generate(
        **cache.generate_kwargs(prompt.question_ids[None]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert made[0, len(prompt.question_ids) :].tolist() == expected
    assert cache.next_position == cache.num_rows == cache.get_seq_length()


def test_full_prefill_decodes_like_the_models_own_generate(family_loom: Loom, prompt: Prompt) -> None:
    got = family_loom.answer(QUESTION, DOCUMENTS, selector="full", max_new_tokens=6).token_ids
    made = family_loom.model.generate(
        input_ids=prompt.token_ids[None],
        attention_mask=torch.ones_like(prompt.token_ids)[None],
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    assert made[0, prompt.num_tokens :].tolist() == got
