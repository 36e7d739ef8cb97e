"""Tiny random models of many families, and the tolerance of every comparison."""

from __future__ import annotations

from typing import Any

import torch
from byte_tokenizer import ByteTokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvloom.loom import Loom

NUM_LAYERS = 3
FLOAT32 = 1e-4
"""Largest relative difference between two computations of the same float32 numbers."""

COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": None,  # nothing ends an answer early unless a test says so
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 1024,
}
ALL_FULL = ["full_attention"] * NUM_LAYERS
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 16},
    "llama-llama3": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3},
    "llama-yarn": {"model_type": "llama", "head_dim": 16, "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "phi3": {"model_type": "phi3"},
    "phi3-longrope": {
        "model_type": "phi3",
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 1024,
    },
    "phi": {"model_type": "phi"},
    "gpt-neox": {"model_type": "gpt_neox"},
    "glm": {"model_type": "glm", "head_dim": 16},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "olmo2": {"model_type": "olmo2"},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "layer_types": ALL_FULL},
    "cohere": {"model_type": "cohere"},
    "granite": {"model_type": "granite"},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "layer_types": ALL_FULL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **EXPERTS,
    },
}
"""Supported: every exactness oracle runs on each."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic NTK": (
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
        "dynamic NTK scaling",
    ),
    "NoPE layers (SmolLM3)": (
        {"model_type": "smollm3", "no_rope_layers": [1, 1, 0]},
        r"wrong in 1 of 3 layers \(2",
    ),
    "rotary per layer type (Gemma 3)": (
        {"model_type": "gemma3_text", "head_dim": 16},
        "rotary embedding per layer type",
    ),
    "sliding window (Mistral 7B v0.1)": (
        {"model_type": "mistral", "sliding_window": 64},
        "sliding window of 64 tokens",
    ),
    "sliding window in some layers (gpt-oss)": (
        {
            "model_type": "gpt_oss",
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            **EXPERTS,
        },
        "sliding window of 128 tokens",
    ),
    "no rotary embedding (GPT-2)": ({"model_type": "gpt2"}, "no rotary position embedding"),
    "alibi (BLOOM)": ({"model_type": "bloom"}, "no rotary position embedding"),
    "attention of its own (StableLM)": ({"model_type": "stablelm"}, "attention interface"),
}
"""Refused, with a part of the sentence that says why."""


def build(config: dict[str, Any], *, seed: int = 0) -> Any:
    """A random float32 model of the config over COMMON; weights large enough that attention is far from
    flat.
    """
    options = COMMON | config
    torch.manual_seed(seed)
    made = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(4)
            elif "sinks" in name or "bias" in name:
                weight.normal_()
    return model


def loom_of(family: str, *, tokenizer: Any = None, **options: Any) -> Loom:
    """A Loom over the family's tiny model, with a byte tokenizer unless another is given."""
    return Loom(
        build(FAMILIES[family]), ByteTokenizer(eos_token=None) if tokenizer is None else tokenizer, **options
    )


def difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected number."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


DOCUMENTS = [
    "The loom stood in the attic, and nobody had touched it for years.",
    "x",
    "A weaver from Lyon bought it in 1804 and wove a blue cloth on it.",
    "Blue cloth was worth more than silver in that valley.",
]
QUESTION = "Who bought the loom?"
