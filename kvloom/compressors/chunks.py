"""Both halves together: chunks are compressed when they are indexed, and spliced with what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvloom.compressors.compress import compress
from kvloom.hf import cat_ids
from kvloom.kv import ChunkKV
from kvloom.observe import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvloom.compressors.base import Compressor
    from kvloom.hf import Decoder


def prefill_compressed(
    decoder: Decoder, chunk_ids: Sequence[Tensor], header_ids: Tensor, compressor: Compressor
) -> Iterator[ChunkKV]:
    """As `kvloom.prefill.prefill`, but of each chunk (T,) int64 only what the compressor keeps.

    The share `keep` is of the chunk's tokens: the header's rows are seen, all kept, and then left out. The
    header is run anew with every chunk, so that a compressor that looks at signals has those of all rows.
    """
    num_header = len(header_ids)
    for ids in chunk_ids:
        cache = decoder.new_cache(num_header + len(ids))
        observer = Observer(decoder, cache, compressor.records)
        observer.run(cat_ids([header_ids, ids]))
        compress(compressor, cache, observer, num_apart=num_header)
        layers = range(decoder.num_layers)
        held = [cache.layers[layer].rows for layer in layers]
        every = torch.arange(cache.num_rows)
        rows = tuple(
            (every.expand(shape.num_heads, -1) if rows is None else rows.cpu())[:, num_header:] - num_header
            for rows, shape in zip(held, decoder.kv_shapes, strict=True)
        )
        yield ChunkKV(
            token_ids=ids.cpu(),
            keys=tuple(cache.keys(layer)[:, num_header:].clone() for layer in layers),
            values=tuple(cache.values(layer)[:, num_header:].clone() for layer in layers),
            fingerprint=decoder.fingerprint,
            start=num_header,
            rows=tuple(row.to(torch.int32) for row in rows) if any(row is not None for row in held) else None,
            compressor=repr(compressor),
        )
