"""Models to bench: any that kvloom loads, or one of a known shape with random weights, since speed needs no
others.

``random:NAME`` builds the shape in place, on the device and in the number format asked for, with a tokenizer
whose tokens are bytes. What such a model says is noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvloom.errors import ModelError
from kvloom.loom import Loom
from kvloom.prompt import PromptFormat
from kvloom.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

RANDOM = "random:"

STORE = "memory:64GiB"
"""A store in memory that no bench fills."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {  # meta-llama/Llama-3.1-8B
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "qwen3-0.6b": {  # Qwen/Qwen3-0.6B
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "toy": {  # for tests
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes, and 256 the beginning of a text."""

    bos_token_id = 256
    eos_token_id = None
    all_special_ids = (256,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in map(int, ids) if token < 256).decode("utf-8", "replace")


def open_model(
    name: str, *, chunk_tokens: int, store: str, dtype: str | None = None, device: str | None = None
) -> Loom:
    """A Loom over the model of this name, or over random weights for ``random:NAME``.

    Raises ``ModelError`` for a shape that is not known, and as `Loom.from_pretrained` does.
    """
    format = PromptFormat(chunk_tokens=chunk_tokens)
    if not name.startswith(RANDOM):
        return Loom.from_pretrained(name, store=store, dtype=dtype, device=device, prompt_format=format)
    return Loom(random_model(name, dtype, device), Bytes(), store=store, prompt_format=format)


def check_name(name: str) -> None:
    """Raises ``ModelError`` for ``random:NAME`` of a shape that is not known."""
    shape = name.removeprefix(RANDOM)
    if name.startswith(RANDOM) and shape not in SHAPES:
        raise ModelError(
            f"unknown shape {name!r}{did_you_mean(name, dict.fromkeys(RANDOM + known for known in SHAPES))}"
        )


def random_model(name: str, dtype: str | None, device: str | None) -> Any:
    """The model of ``random:NAME``, the same weights on every call; `dtype` None is float32."""
    check_name(name)
    options = dict(SHAPES[name.removeprefix(RANDOM)])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    number_format = torch.float32 if dtype in (None, "auto") else getattr(torch, str(dtype))
    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=number_format).eval()
