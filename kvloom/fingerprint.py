"""Fingerprint: the identity of all that a KV cache depends on."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
import xxhash

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FINGERPRINT_VERSION = 2
INCIDENTAL = ("_name_or_path", "transformers_version", "_attn_implementation", "dtype", "use_cache")
"""Entries of a config that change no KV, or that are counted apart."""


@torch.no_grad()
def fingerprint(model: PreTrainedModel, config: Any, tokenizer_identity: str) -> str:
    """SHA-256 (hex) over the config with its rope, every weight's bytes, the dtype, and the tokenizer."""
    described = {name: value for name, value in config.to_dict().items() if name not in INCIDENTAL}
    identity = [FINGERPRINT_VERSION, str(model.dtype), tokenizer_identity, described]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_content_mark(tensor)}".encode())
    return digest.hexdigest()


def _content_mark(tensor: Tensor) -> str:
    """xxh3-128 (hex) of the tensor's bytes."""
    words = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(words.numpy().data)
