"""ChunkKVs + Layout -> SplicedCache: keys rotated to their global positions, values copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder
    from kvloom.kv import ChunkKV


def splice_into(decoder: Decoder, cache: SplicedCache, rows: range, start: int, kv: ChunkKV) -> None:
    """Writes a chunk's KV into announced rows of the cache, its first token at position `start`.

    Keys move once, by the difference of positions, in float32: from where they were computed to `start`.
    """
    delta = start - kv.start
    rotation = decoder.rotation(delta) if delta else None
    for layer in range(kv.num_layers):
        cache.write(layer, rows, move(kv.keys[layer].to(cache.device), rotation), kv.values[layer])


def move(keys: Tensor, rotation: Tensor | None) -> Tensor:
    """Keys (H, T, D) moved by the rotation (D, D) float32, in their own dtype; unchanged for None."""
    if rotation is None:
        return keys
    return torch.matmul(keys.float(), rotation).to(keys.dtype)
