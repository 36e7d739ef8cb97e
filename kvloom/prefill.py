"""Token ids -> ChunkKV: each chunk alone behind the header, several chunks packed into one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.attention import Packed
from kvloom.hf import Decoder, cat_ids
from kvloom.kv import ChunkKV

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvloom.cache import SplicedCache

PACKED_TOKENS = 2048
"""Tokens of one packed forward: large enough for efficient matrix products, small enough for its
activations.
"""


def prefill(
    decoder: Decoder, chunk_ids: Sequence[Tensor], header: ChunkKV | None = None
) -> Iterator[ChunkKV]:
    """The KV of each chunk (T,) int64, computed at positions len(header).. behind the header, in the order
    given.

    No chunk sees another. The header's rows are seen and dropped, so that no chunk has an attention sink of
    its own.
    """
    start = 0 if header is None else header.num_tokens
    for pack in packs([len(ids) for ids in chunk_ids]):
        yield from _prefill_pack(decoder, [chunk_ids[index] for index in pack], header, start)


def packs(lengths: Sequence[int]) -> Iterator[range]:
    """Which chunks go into one forward: consecutive ones of at most `PACKED_TOKENS`, or one longer alone."""
    first, total = 0, 0
    for index, length in enumerate(lengths):
        if index > first and total + length > PACKED_TOKENS:
            yield range(first, index)
            first, total = index, 0
        total += length
    if first < len(lengths):
        yield range(first, len(lengths))


def _prefill_pack(
    decoder: Decoder, pack: list[Tensor], header: ChunkKV | None, start: int
) -> Iterator[ChunkKV]:
    lengths = [len(ids) for ids in pack]
    cache = decoder.new_cache(start + sum(lengths))
    if header is not None:
        put_unmoved(cache, header)
    positions = cat_ids([torch.arange(start, start + length) for length in lengths])
    token_ids = cat_ids(pack)
    decoder.fill(token_ids, positions, cache, num_new=len(token_ids), plan=lambda _: Packed(lengths))
    first = start
    for ids in pack:
        rows = slice(first, first + len(ids))
        layers = range(decoder.num_layers)
        yield ChunkKV(
            token_ids=ids.cpu(),
            keys=tuple(cache.keys(layer)[:, rows].clone() for layer in layers),
            values=tuple(cache.values(layer)[:, rows].clone() for layer in layers),
            fingerprint=decoder.fingerprint,
            start=start,
        )
        first += len(ids)


def put_unmoved(cache: SplicedCache, kv: ChunkKV) -> None:
    """Appends a chunk's rows at the positions where they were computed."""
    rows = cache.announce(kv.token_ids, torch.arange(kv.start, kv.start + kv.num_tokens), exact=True)
    cache.allocate()
    for layer in range(kv.num_layers):
        cache.write(layer, rows, kv.keys[layer], kv.values[layer])
