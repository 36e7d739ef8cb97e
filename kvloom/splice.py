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
    move = Move(decoder.rotation(delta)) if delta else None
    for layer in range(kv.num_layers):
        keys, values = kv.keys[layer].to(cache.device), kv.values[layer].to(cache.device)
        if kv.rows is not None:
            places = rows.start + kv.rows[layer].to(cache.device, torch.int64)
            cache.write_places(layer, places, keys if move is None else move(keys), values)
        elif move is None:
            cache.write(layer, rows, keys, values)
        else:
            held_keys, held_values = cache.slot(layer, rows)
            move(keys, held_keys)
            held_values.copy_(values)


def leave_out(cache: SplicedCache, compressed: Sequence[tuple[range, tuple[Tensor, ...]]]) -> None:
    """Drops what compressed chunks do not hold: of a range of rows all but those given, L x (H, S), counted
    from its start.
    """
    if not compressed:
        return
    for layer, buffers in enumerate(cache.layers):
        is_held = torch.ones(buffers.keys.shape[1:3], dtype=torch.bool, device=cache.device)
        for span, rows in compressed:
            is_held[:, span.start : span.stop] = False
            is_held.scatter_(1, span.start + rows[layer].to(cache.device, torch.int64), True)
        cache.keep(layer, is_held.nonzero()[:, 1].view(len(is_held), -1))


class Move:
    """Keys (H, T, D) -> keys @ rotation (D, D), in float32, in their own dtype.

    Where dimension d turns with d + D/2, as in most models, that is keys * cos + other half * sin, which is
    D/2 times less arithmetic than the matrix product. Elsewhere (interleaved, partial rotary) it is the
    product.
    """

    def __init__(self, rotation: Tensor) -> None:
        half = len(rotation) // 2
        first, second = torch.diagonal(rotation, half), torch.diagonal(rotation, -half)
        self._rotation = rotation
        self._cos, self._sin = torch.diagonal(rotation).contiguous(), torch.cat([second[:half], first[:half]])
        turned = torch.diag(self._cos) + torch.diag(first, half) + torch.diag(second, -half)
        self._is_by_halves = len(rotation) == 2 * half and turned.equal(rotation)

    def __call__(self, keys: Tensor, into: Tensor | None = None) -> Tensor:
        """The moved keys, written to `into` if given."""
        into = torch.empty_like(keys) if into is None else into
        if not self._is_by_halves:
            return into.copy_(torch.matmul(keys.float(), self._rotation))
        given, half = keys.float(), keys.shape[2] // 2
        # Float32 keys need no copy on the way: they turn where they are wanted.
        moved = torch.mul(given, self._cos, out=into) if into.dtype == torch.float32 else given * self._cos
        moved[..., :half].addcmul_(given[..., half:], self._sin[:half])
        moved[..., half:].addcmul_(given[..., :half], self._sin[half:])
        return into if moved is into else into.copy_(moved)
