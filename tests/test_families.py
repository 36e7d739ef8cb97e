from __future__ import annotations

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from tiny_models import FAMILIES, FLOAT32, REFUSED, build
from transformers import T5Config, T5ForConditionalGeneration

from kvloom import families
from kvloom.errors import UnsupportedModel
from kvloom.hf import Decoder
from kvloom.loom import Loom


@pytest.mark.parametrize("case", REFUSED)
def test_models_whose_cache_cannot_be_moved_are_refused_in_one_sentence(case: str) -> None:
    config, reason = REFUSED[case]
    model = build(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        Loom(model, ByteTokenizer())
    assert "\n" not in str(refusal.value)
    assert model.config._attn_implementation == before, "a refused model is left as it was"


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        Loom(T5ForConditionalGeneration(config), ByteTokenizer())


def test_a_window_at_least_as_long_as_the_context_is_no_window() -> None:
    assert Loom(build({"model_type": "mistral", "sliding_window": 2048}), ByteTokenizer()).rotation_errors


def test_longrope_is_limited_to_the_length_where_its_frequencies_are_constant() -> None:
    assert Decoder(build(FAMILIES["phi3-longrope"])).max_length == 1024


def test_the_check_sees_a_wrong_rotation() -> None:
    decoder = Decoder(build(FAMILIES["llama"]))
    assert max(families.rotation_errors(decoder)) < FLOAT32
    decoder.rotary.inv_freq.mul_(1.01)
    errors = families.rotation_errors(decoder)
    assert max(errors) < FLOAT32, "a scaled rotary is still a rotary"
    true_rotation = decoder.rotation
    decoder.rotation = lambda delta: true_rotation(delta + 1)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="wrong in 3 of 3 layers"):
        families.check(decoder)


def test_yarn_keys_keep_their_length_when_moved() -> None:
    """YaRN folds a factor into cos and sin; with the raw tables a move would multiply keys by it."""
    decoder = Decoder(build(FAMILIES["llama-yarn"]))
    assert decoder.rotary.attention_scaling > 1.1
    rotation = decoder.rotation(100)
    assert torch.allclose(rotation @ rotation.T, torch.eye(16), atol=1e-5)


def test_fingerprint_tells_models_apart() -> None:
    prints = {
        Decoder(build(FAMILIES["llama"])).fingerprint,
        Decoder(build(FAMILIES["llama"], seed=1)).fingerprint,
        Decoder(build(FAMILIES["llama"]).bfloat16()).fingerprint,
        Decoder(build(FAMILIES["llama-yarn"])).fingerprint,
        Decoder(build(FAMILIES["llama"]), tokenizer_identity="other").fingerprint,
    }
    assert len(prints) == 5
    assert Decoder(build(FAMILIES["llama"])).fingerprint in prints
    edited = build(FAMILIES["llama"])
    with torch.no_grad():
        edited.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert Decoder(edited).fingerprint not in prints
    swapped = build(FAMILIES["llama"])
    with torch.no_grad():
        weight = swapped.model.layers[1].mlp.up_proj.weight
        weight[[3, 4]] = weight[[4, 3]]
    assert Decoder(swapped).fingerprint not in prints


def test_the_check_looks_at_far_moves_too() -> None:
    decoder = Decoder(build(FAMILIES["llama"]))
    true_rotation = decoder.rotation
    decoder.rotation = lambda delta: true_rotation(delta + (delta > 64))  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="wrong in 3 of 3 layers"):
        families.check(decoder)


def test_fingerprint_sees_flipped_signs() -> None:
    plain, flipped = build(FAMILIES["llama"]), build(FAMILIES["llama"])
    with torch.no_grad():
        flipped.model.layers[1].mlp.up_proj.weight[5].mul_(-1)
    assert Decoder(plain).fingerprint != Decoder(flipped).fingerprint
