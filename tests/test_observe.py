"""What is recorded of forwards, against the model's own: whole and in blocks, on every family."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from plain_forward import drift_by_hand, entropy_by_hand, plain, random_ids
from tiny_models import FAMILIES, FLOAT32, build, difference, loom_of
from torch import Tensor

from kvloom import observe
from kvloom.errors import MethodError
from kvloom.observe import EntropyKind, Observer, Records, restricted_entropy

if TYPE_CHECKING:
    from kvloom.loom import Loom

EVERYTHING = Records(entropy=EntropyKind(k=20), drift="residual", window=16, received=True, moments=True)


def observed(
    loom: Loom, ids: Tensor, records: Records = EVERYTHING, *, runs: int = 1
) -> tuple[Observer, Tensor]:
    observer = Observer(loom.decoder, loom.decoder.new_cache(0), records)
    logits = torch.empty(0)
    for part in ids.tensor_split(runs):
        logits = observer.run(part)
    return observer, logits


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "TOKENS_PER_BLOCK", 7)
    monkeypatch.setattr(observe, "ROWS_PER_HEAD_BLOCK", 3)


def test_the_reference_is_the_models_own_eager_forward(family_loom: Loom) -> None:
    """Everything below rests on `plain`; here it is compared with code that is not ours."""
    ids, model = random_ids(40), family_loom.model
    got = plain(family_loom, ids)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=ids[None], output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation(implementation)
    assert difference(got.logits, own.logits[0]) < FLOAT32
    for layer, weights in enumerate(own.attentions):
        assert difference(got.weights[layer].flatten(0, 1), weights[0]) < FLOAT32
    for layer, states in enumerate(own.hidden_states[1:-1]):
        assert difference(got.states[layer], states[0]) < FLOAT32
    assert difference(got.normed, own.hidden_states[-1][0]) < FLOAT32


def test_layers_are_heard_and_the_head_is_the_models_own(family_loom: Loom) -> None:
    """Residual stream after every layer, final states, and logits with the model's scale and soft-cap."""
    decoder, ids, heard = family_loom.decoder, random_ids(30), {}
    expected = plain(family_loom, ids)
    states = decoder.observe(ids, torch.arange(30), decoder.new_cache(0), heard.__setitem__)
    assert sorted(heard) == list(range(decoder.num_layers))
    for layer in heard:
        assert difference(heard[layer], expected.states[layer]) < FLOAT32, f"layer {layer}"
    assert difference(states, expected.normed) < FLOAT32
    assert difference(decoder.head(states), expected.logits) < FLOAT32
    assert difference(heard[decoder.num_layers - 1], states) > 100 * FLOAT32, "a norm lies between"


@pytest.mark.usefixtures("small_blocks")
def test_signals_in_blocks_are_those_of_the_whole_by_the_models_own_forward(family_loom: Loom) -> None:
    ids = random_ids(45)
    expected = plain(family_loom, ids)
    observer, logits = observed(family_loom, ids)
    cache = observer.cache
    assert difference(logits, expected.logits[-1]) < FLOAT32
    assert difference(cache.side["entropy"], entropy_by_hand(expected.logits, 20)) < FLOAT32
    assert difference(cache.side["drift"], drift_by_hand(expected.states, expected.states[-1])) < FLOAT32
    assert cache.side["drift"][-1].abs().max() < 1e-6
    for layer in range(family_loom.decoder.num_layers):
        assert difference(cache.keys(layer), expected.keys[layer]) < FLOAT32
        assert difference(cache.values(layer), expected.values[layer]) < FLOAT32
        queries = expected.queries[layer].flatten(0, 1)
        assert difference(observer.queries[layer], queries[:, -16:]) < FLOAT32
        received = expected.weights[layer].sum(2).flatten(0, 1)
        assert difference(observer.received[layer], received) < FLOAT32


def test_blocks_change_nothing(llama_loom: Loom, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(60)
    whole, logits = observed(llama_loom, ids)
    monkeypatch.setattr(observe, "TOKENS_PER_BLOCK", 7)
    monkeypatch.setattr(observe, "ROWS_PER_HEAD_BLOCK", 2)
    for runs in (1, 5, 60):  # 60: each token by itself, as while decoding
        got, in_blocks = observed(llama_loom, ids, runs=runs)
        assert difference(in_blocks, logits) < 1e-5
        first = 0 if runs == 1 else 1  # the first token has the mean of its own run
        entropy, expected = got.cache.side["entropy"], whole.cache.side["entropy"]
        assert difference(entropy[first:], expected[first:]) < 1e-5
        assert float((got.cache.side["drift"] - whole.cache.side["drift"]).abs().max()) < 1e-5
        for layer in range(3):
            assert difference(got.cache.keys(layer), whole.cache.keys(layer)) < 1e-5
            assert difference(got.queries[layer], whole.queries[layer]) < 1e-5
            assert difference(got.received[layer], whole.received[layer]) < 1e-5
            for mine, theirs in zip(got.moments(layer), whole.moments(layer), strict=True):
                assert difference(mine, theirs) < FLOAT32


def test_moments_are_those_of_the_query_projection(llama_loom: Loom) -> None:
    """Before RoPE, so as the projection puts them out; the first four tokens do not count."""
    heard: dict[int, Tensor] = {}

    def listener(layer: int) -> Any:
        return lambda _, __, output: heard.__setitem__(layer, output[0])

    ids = random_ids(50)
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(listener(n))
        for n, layer in enumerate(llama_loom.model.model.layers)
    ]
    plain(llama_loom, ids)
    for hook in hooks:
        hook.remove()
    observer, _ = observed(llama_loom, ids, Records(moments=True), runs=3)
    for layer in range(3):
        queries = heard[layer].unflatten(1, (4, 16)).transpose(0, 1)[:, 4:].double()  # (H * G, T, D)
        mean, covariance = observer.moments(layer)
        assert difference(mean, queries.mean(1).float()) < FLOAT32
        by_hand = torch.stack([head.T.cov(correction=0) for head in queries]).float()
        assert difference(covariance, by_hand) < FLOAT32


def test_a_surprising_token_has_the_top_entropy_and_not_its_neighbour() -> None:
    """A model that is sure of everything but of what follows token 7: the token there is the surprise."""
    loom = made_of_logits()
    ids = torch.tensor([1, 2, 3, 7, 4, 5, 6, 2])
    observer, _ = observed(loom, ids, Records(entropy=EntropyKind(k=5)))
    entropy = observer.cache.side["entropy"]
    assert int(entropy.argmax()) == 4, "the token after 7, whose distribution was flat"
    assert abs(float(entropy[4]) - math.log(5)) < 1e-3
    others = entropy[[1, 2, 3, 5, 6, 7]]
    assert others.max() < 0.1
    assert torch.allclose(entropy[0], entropy[1:].mean())


def made_of_logits() -> Any:
    """A llama whose head gives flat logits after token 7 and a sharp peak after every other."""
    from byte_tokenizer import ByteTokenizer

    from kvloom.loom import Loom

    model = build(FAMILIES["llama"])
    with torch.no_grad():
        for layer in model.model.layers:  # the residual stream is the embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()[:, 0] = 1
        embedding[7, 0], embedding[7, 1] = 0, 1
        head.zero_()[9, 0] = 10
    return Loom(model, ByteTokenizer(eos_token=None))


def test_entropy_over_the_likeliest_tokens_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0]]))
    whole = restricted_entropy(logits, EntropyKind(k=4))
    assert torch.allclose(whole, torch.tensor([1.75 * math.log(2), 0.0]), atol=1e-6)
    two = restricted_entropy(logits, EntropyKind(k=2))[0]
    assert math.isclose(two, -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), rel_tol=1e-5)
    bare = restricted_entropy(logits, EntropyKind(k=2, renormalize=False))[0]
    assert math.isclose(bare, 0.5 * math.log(2) + 0.25 * math.log(4), rel_tol=1e-5)


def test_a_uniform_top_k_has_entropy_ln_k_and_k_may_exceed_the_vocabulary() -> None:
    logits = torch.full((2, 300), -20.0)
    logits[:, 40:56] = 3.0
    assert torch.allclose(restricted_entropy(logits, EntropyKind(k=16)), torch.tensor(math.log(16)))
    small = torch.zeros(1, 50)
    assert torch.allclose(restricted_entropy(small, EntropyKind(k=256)), torch.tensor(math.log(50)))
    half = torch.zeros(1, 50, dtype=torch.float16)
    assert restricted_entropy(half, EntropyKind()).dtype == torch.float32


def test_masked_tokens_of_the_vocabulary_are_no_part_of_the_entropy() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[:, :4] = 1.0
    for kind in (EntropyKind(k=10), EntropyKind(k=10, renormalize=False)):
        assert torch.allclose(restricted_entropy(logits, kind), torch.tensor(math.log(4)))


def test_normed_drift_compares_with_the_normed_last_state(family_loom: Loom) -> None:
    ids = random_ids(24)
    expected = plain(family_loom, ids)
    observer, _ = observed(family_loom, ids, Records(drift="normed"))
    by_hand = drift_by_hand(expected.states, expected.normed)
    assert difference(observer.cache.side["drift"][:-1], by_hand[:-1]) < FLOAT32
    assert observer.cache.side["drift"][-1].tolist() == [0.0] * 24


def test_records_are_joined_and_differences_refused() -> None:
    both = Records(window=4, drift="residual") | Records(window=9, received=True, entropy=EntropyKind(k=3))
    assert both == Records(window=9, drift="residual", received=True, entropy=EntropyKind(k=3))
    with pytest.raises(MethodError, match="different entropy"):
        Records(entropy=EntropyKind(k=3)) | Records(entropy=EntropyKind(k=4))
    with pytest.raises(MethodError, match="different drift"):
        Records(drift="residual") | Records(drift="normed")


def test_a_single_token_and_none() -> None:
    loom = made_of_logits()
    observer, _ = observed(loom, torch.tensor([3]))
    assert observer.cache.side["entropy"].tolist() == [0.0]
    with pytest.raises(ValueError, match="at least one token"):
        observer.run(torch.empty(0, dtype=torch.int64))


def test_nothing_is_left_on_the_model() -> None:
    loom = loom_of("llama")  # transformers itself leaves hooks on a model whose hidden states were asked for

    def parts() -> list[Any]:
        return [
            (
                name,
                id(module),
                list(module._forward_hooks),
                list(module._forward_pre_hooks),
                sorted(vars(module)),
            )
            for name, module in loom.model.named_modules()
        ]

    before, implementation = parts(), loom.model.config._attn_implementation
    assert not any(hooks or others for _, _, hooks, others, _ in before)
    observed(loom, random_ids(20))
    assert parts() == before
    assert loom.model.config._attn_implementation == implementation
    assert loom.decoder.body is loom.model.model


def test_rows_that_another_forward_appended_are_not_taken_for_observed(llama_loom: Loom) -> None:
    observer, _ = observed(llama_loom, random_ids(30))
    cache = observer.cache
    llama_loom.decoder.follow(random_ids(5, seed=2), cache)
    observer.run(random_ids(4, seed=3))
    assert observer.queries[0].shape[1] == 4, "those before the gap are not the last ones any more"
    assert not observer.is_whole
    entropy, drift = cache.side["entropy"], cache.side["drift"]
    assert entropy.isnan().nonzero().flatten().tolist() == [30, 31, 32, 33, 34, 35]
    assert drift.isnan().any(0).nonzero().flatten().tolist() == [30, 31, 32, 33, 34]


def test_checkpoint_takes_back_what_was_recorded(llama_loom: Loom) -> None:
    observer, _ = observed(llama_loom, random_ids(30))
    cache = observer.cache
    restore_cache, restore = cache.checkpoint(), observer.checkpoint()
    queries, moments = observer.queries[1].clone(), observer.moments(1)[0].clone()
    first = observer.run(random_ids(9, seed=4))
    assert restore_cache()
    restore()
    assert torch.equal(observer.queries[1], queries)
    assert torch.equal(observer.moments(1)[0], moments)
    assert cache.side["entropy"].shape == (30,)
    assert torch.equal(observer.run(random_ids(9, seed=4)), first)
    assert observer.is_whole
    restore_cache = cache.checkpoint()
    cache.keep(0, torch.tensor([[0, 1]]))
    assert not restore_cache(), "rows that were dropped cannot be taken back"
    assert cache.num_rows == 39
