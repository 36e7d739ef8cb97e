"""ChunkKVs + Layout -> SplicedCache: keys rotated to their global positions, values copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder
    from kvloom.kv import ChunkKV
    from kvloom.layout import Layout


def announce(
    cache: SplicedCache, header_ids: Tensor, chunk_ids: Sequence[Tensor], layout: Layout, *, num_behind: int
) -> None:
    """Rows for header and chunks at the layout's positions, for `splice_into` to fill; `num_behind` is the
    number of tokens that the chunks were prefilled behind.
    """
    num_header = len(header_ids)
    cache.announce(header_ids, torch.arange(num_header), exact=True)
    for ids, start in zip(chunk_ids, layout.starts, strict=True):
        # Computed at this very place, behind this very header.
        is_exact = start == num_behind == num_header
        cache.spans.append(cache.announce(ids, start + torch.arange(len(ids)), exact=is_exact))
    cache.next_position = layout.next_position
    cache.allocate()


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
