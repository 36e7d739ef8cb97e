"""Which models can be spliced: a check at load time, not a list of names.

The check prefills a few tokens at positions 0.. and at 64.. and 1000.., moves the first keys there with the
model's own rotary function, and compares them layer by layer with the second. What the check cannot see in a
few tokens (frequencies that change with length, windows longer than the test) is read off the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvloom.errors import UnsupportedModel

if TYPE_CHECKING:
    from kvloom.hf import Decoder

CHECK_SHIFTS = (64, 1000)
CHECK_TOKENS = 12

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference between moved and computed keys of a layer that passes, by dtype."""


def check(decoder: Decoder) -> list[float]:
    """Returns each layer's rotation error when the decoder's KV can be moved; else raises
    ``UnsupportedModel``.

    A refused model has its own attention function back.
    """
    try:
        return _checked(decoder)
    except UnsupportedModel:
        decoder.release()
        raise


def _checked(decoder: Decoder) -> list[float]:
    refuse_by_config(decoder)
    errors = rotation_errors(decoder)
    tolerance = TOLERANCE.get(decoder.dtype, max(TOLERANCE.values()))
    wrong = [layer for layer, error in enumerate(errors) if not error <= tolerance]
    if wrong:
        layers = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise UnsupportedModel(
            f"{decoder.name}: moving keys by rotation is wrong in {len(wrong)} of {len(errors)} layers "
            f"({layers}; "
            f"relative error {errors[wrong[0]]:.2g}); they may have no rotary embedding (NoPE) or one of "
            f"their own, "
            "and kvloom cannot reuse such a model's cache"
        )
    return errors


def refuse_by_config(decoder: Decoder) -> None:
    """Raises ``UnsupportedModel`` for what a few tokens cannot show."""
    config = decoder.config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(
            f"{decoder.name} has a rotary embedding per layer type ({', '.join(rope)}), which kvloom does "
            f"not support yet"
        )
    if rope.get("rope_type") == "dynamic":
        raise UnsupportedModel(
            f"{decoder.name} uses dynamic NTK scaling, whose frequencies change with the prompt's length, "
            f"so stored keys "
            "cannot be moved; use a model or config with another rope_type (yarn, llama3, linear)"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = layer_types - {"full_attention", "sliding_attention"}
    if foreign:
        raise UnsupportedModel(
            f"{decoder.name} has {', '.join(sorted(foreign))} layers, which have no KV cache to reuse"
        )
    window = getattr(config, "sliding_window", None)
    if (
        window is not None
        and getattr(config, "use_sliding_window", True)
        and _window_is_active(decoder, layer_types)
    ):
        raise UnsupportedModel(
            f"{decoder.name} attends through a sliding window of {window} tokens, which kvloom does not "
            f"support yet"
        )


def _window_is_active(decoder: Decoder, layer_types: set[str]) -> bool:
    """Whether some layer's window is shorter than the context: layer types say so, or else every layer has
    it.
    """
    config = decoder.config
    has_window = "sliding_attention" in layer_types if getattr(config, "layer_types", None) else True
    return has_window and config.sliding_window < (decoder.max_length or config.sliding_window + 1)


def rotation_errors(decoder: Decoder) -> list[float]:
    """Per layer, the largest |moved - computed| / |computed| of keys moved by each of `CHECK_SHIFTS`.

    Shifts that the model's context does not hold are left out, but for the first.
    """
    token_ids = torch.arange(1, CHECK_TOKENS + 1) % decoder.vocab_size
    places = torch.arange(CHECK_TOKENS)
    near = decoder.new_cache(CHECK_TOKENS)
    decoder.fill(token_ids, places, near, num_new=CHECK_TOKENS)
    worst = [0.0] * decoder.num_layers
    for shift in CHECK_SHIFTS:
        if shift > CHECK_SHIFTS[0] and shift + CHECK_TOKENS > (decoder.max_length or shift):
            continue
        far = decoder.new_cache(CHECK_TOKENS)
        decoder.fill(token_ids, places + shift, far, num_new=CHECK_TOKENS)
        try:
            rotation = decoder.rotation(shift)
            moved = [near.keys(layer).float() @ rotation for layer in range(decoder.num_layers)]
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"{decoder.name}: its rotary function cannot be applied to stored keys ({error})"
            ) from error
        for layer, keys in enumerate(moved):
            computed = far.keys(layer).float()
            error = float((keys - computed).norm() / computed.norm())
            worst[layer] = error if error != error else max(worst[layer], error)  # NaN must stay
    return worst
