"""A row that was dropped is a row that no later query sees, on every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from compressing import compressed, prefilled
from plain_forward import REMOVED, history, plain, random_ids, rows_left
from tiny_models import difference

from kvloom.compressors import Compressor, as_compressor

if TYPE_CHECKING:
    from kvloom.loom import Loom

N, MORE = 60, 6


def methods() -> dict[str, Compressor]:
    """One that keeps a set for each kv head, and one whose layers keep unequal numbers."""
    return {
        "infokv": as_compressor("infokv", {"keep": 0.3, "window": 8, "k": 20}),
        "pyramidkv": as_compressor("pyramidkv", {"keep": 0.4, "window": 4, "beta": 4}),
    }


@pytest.mark.parametrize("name", sorted(methods()))
def test_removal_equals_an_additive_mask(family_loom: Loom, name: str) -> None:
    """Tokens one by one and several at once, after rows were dropped per layer and head."""
    ids = random_ids(N + MORE, seed=3)
    talk, done = compressed(family_loom, ids[:N], methods()[name])
    if name == "pyramidkv":
        assert len(set(done.kept)) == 3, "layers of unequal length"
    left = rows_left(talk.cache)
    steps = [talk.step(int(token)) for token in ids[N : N + 3]]
    steps += family_loom.decoder.follow(ids[N + 3 :], talk.cache)
    expected = plain(family_loom, ids, history(family_loom, N + MORE, [(N, left)]))
    for step, logits in enumerate(steps):
        assert difference(logits, expected.logits[N + step]) < REMOVED, f"token {step}"
    for layer in range(len(left)):
        assert difference(talk.cache.keys(layer)[:, -MORE:], expected.keys[layer][:, -MORE:]) < REMOVED
    assert talk.cache.positions.tolist() == list(range(N + MORE))
    whole = plain(family_loom, ids)
    assert difference(steps[-1], whole.logits[-1]) > 100 * REMOVED, "dropping rows changed nothing"


def test_the_models_generate_goes_on_over_layers_of_unequal_length(family_loom: Loom) -> None:
    ids = random_ids(N + 4, seed=3)
    talk, _ = compressed(family_loom, ids[:N], methods()["pyramidkv"])
    left = rows_left(talk.cache)
    made = family_loom.model.generate(
        **talk.cache.generate_kwargs(ids[N:]), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    whole = torch.cat([ids[:N], made[0]])
    expected = plain(family_loom, whole, history(family_loom, len(whole), [(N, left)]))
    assert made[0, 4:].tolist() == expected.logits[N + 3 : -1].argmax(-1).tolist()
    assert talk.cache.num_rows == len(whole) - 1
    assert talk.cache.next_position == len(whole) - 1


def test_a_batch_stays_refused(llama_loom: Loom) -> None:
    talk, _ = compressed(llama_loom, random_ids(N), methods()["pyramidkv"])
    before = [layer.length for layer in talk.cache.layers]
    kwargs = talk.cache.generate_kwargs(random_ids(4))
    kwargs |= {"input_ids": random_ids(8).view(2, 4), "position_ids": kwargs["position_ids"].expand(2, -1)}
    kwargs |= {"attention_mask": kwargs["attention_mask"].expand(2, -1)}
    with pytest.raises(ValueError, match="a SplicedCache holds one sequence, got a batch of 2"):
        llama_loom.model.generate(**kwargs, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert [layer.length for layer in talk.cache.layers] == before
    assert talk.cache.num_rows == N


def test_signals_travel_with_their_rows(llama_loom: Loom) -> None:
    from kvloom.cache_probe import CacheProbe

    ids = random_ids(N, seed=3)
    method = methods()["infokv"]
    whole, talk = prefilled(llama_loom, ids, method), prefilled(llama_loom, ids, method)
    talk.compress()
    for layer, rows in enumerate(rows_left(talk.cache)):
        probe = CacheProbe(talk.cache, talk.observer)
        assert torch.equal(probe.side("entropy", layer), whole.cache.side["entropy"][rows])
        assert torch.equal(probe.side("drift", layer), whole.cache.side["drift"][layer][rows])


def test_received_attention_travels_with_its_rows(llama_loom: Loom) -> None:
    """After rows were dropped, further queries add to what the survivors received."""
    ids = random_ids(N + MORE, seed=3)
    talk, _ = compressed(llama_loom, ids[:N], as_compressor("h2o", {"keep": 0.4}))
    left = rows_left(talk.cache)
    for token in ids[N:]:
        talk.step(int(token))
    expected = plain(llama_loom, ids, history(llama_loom, N + MORE, [(N, left)]))
    for layer, rows in enumerate(rows_left(talk.cache)):
        for head in range(2):
            by_hand = expected.weights[layer][head].sum(1)[:, rows[head]]
            got = talk.observer.received[layer].view(2, 2, -1)[head]
            assert difference(got, by_hand) < REMOVED
