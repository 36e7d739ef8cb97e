"""Rows (and the question) -> fresh KV in place, and logits, in one pass under the exact causal mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder
    from kvloom.observe import Observer


def recompute(
    decoder: Decoder,
    cache: SplicedCache,
    rows: Tensor,
    question_ids: Tensor | None = None,
    observer: Observer | None = None,
) -> Tensor | None:
    """(V,) float32 logits after the question; its rows are appended, and rows (S,) int64 hold fresh KV.

    At each layer the chosen rows are overwritten first, then they and the question attend to all rows at or
    before their positions; the order of `rows` does not matter. Without a question the rows are repaired and
    nothing is returned. An observer runs the question by itself, behind the repaired rows, to the same
    result. Raises ``ValueError`` for rows out of range or given twice.
    """
    if observer is not None and question_ids is not None:
        recompute(decoder, cache, rows)
        return observer.run(question_ids)
    rows = _checked(rows, cache)
    num_new = 0 if question_ids is None else len(question_ids)
    if len(rows) + num_new == 0:
        return None
    token_ids, positions = cache.token_ids[rows], cache.positions[rows]
    if question_ids is not None:
        places = cache.next_position + torch.arange(num_new, device=cache.device)
        token_ids = torch.cat([token_ids, question_ids.to(cache.device)])
        positions = torch.cat([positions, places])
    with cache.overwriting(rows):
        if num_new:
            return decoder.forward(token_ids, positions, cache, num_new=num_new)
        decoder.fill(token_ids, positions, cache, num_new=0)
    return None


def _checked(rows: Tensor, cache: SplicedCache) -> Tensor:
    if not isinstance(rows, Tensor) or rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError("rows to recompute must be a one-dimensional tensor of row numbers, int64")
    rows = rows.to(cache.device, torch.int64).sort().values
    if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < cache.num_rows:
        raise ValueError(
            f"rows to recompute must lie in 0..{cache.num_rows - 1}, got {int(rows[0])}..{int(rows[-1])}"
        )
    if (rows.diff() == 0).any():
        raise ValueError("rows to recompute must not repeat")
    return rows
