"""Attention whose mask is the positions themselves: a query sees the keys at or before its own position.

A plan says, for one forward pass, who sees whom; the attention function registered in `kvloom.hf` hands each
layer's queries, keys and values to it. Query and key positions are data, so rows may come in any order,
layers may hold different numbers of tokens, and no mask is ever aligned to a corner of the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS_PER_BLOCK = 64
"""Query rows that share one cut of the keys: small enough that the work is the causal one, large enough for
a kernel.
"""

WEIGHTS_PER_BLOCK = 1 << 24
"""Attention weights held at once (elements) where they are needed in full: 64 MiB in float32."""


@dataclass(frozen=True)
class Heads:
    """What a layer adds to plain attention; `sinks` and `softcap` are None in most models."""

    scaling: float
    sinks: Tensor | None = None  # (H * G,) logits of one extra key per head that holds no value (gpt-oss)
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap) (Gemma 2)

    @property
    def is_plain(self) -> bool:
        return self.sinks is None and self.softcap is None


class Plan(Protocol):
    """Who sees whom in one forward pass."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        """The attention output (H * G, S, D) of query (H * G, S, D) over keys and values (H, T, D)."""
        ...


class _Cut(NamedTuple):
    """Query rows first..last-1 see no key beyond the first `num_keys`."""

    first: int
    last: int
    num_keys: int
    is_whole: bool = False  # queries and keys are the same tokens: the kernel's own causal mask serves


class ByPosition:
    """Each query sees the keys at or before its position.

    `query_positions` (S,) int64; `key_positions(layer)` gives (T,) int64, or (H, T) where heads hold
    different tokens. Rows are taken in blocks, and each block's keys are cut at its largest position, so that
    the arithmetic is that of a causal mask and not of a dense one.
    """

    def __init__(self, query_positions: Tensor, key_positions: Callable[[int], Tensor]) -> None:
        self.query_positions = query_positions
        self.key_positions = key_positions
        self._cuts: tuple[Tensor, list[_Cut]] | None = None  # with the key positions that they were made for

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        key_positions = self.key_positions(layer)
        outputs = []
        for first, last, num_keys, is_whole in self._blocks(key_positions):
            block = query[:, first:last], keys[:, :num_keys], values[:, :num_keys]
            if is_whole and heads.is_plain:
                outputs.append(_sdpa(*block, heads.scaling, is_causal=True))
            else:
                mask = _mask(key_positions[..., :num_keys], self.query_positions[first:last])
                outputs.append(attend(*block, mask, heads))
        return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]

    def _blocks(self, key_positions: Tensor) -> list[_Cut]:
        """The blocks of query rows; layers with the same key positions share them."""
        if self._cuts is None or self._cuts[0] is not key_positions:
            self._cuts = key_positions, self._cut(key_positions)
        return self._cuts[1]

    def _cut(self, key_positions: Tensor) -> list[_Cut]:
        queries, num_keys = self.query_positions, key_positions.shape[-1]
        num_rows = len(queries)
        starts = range(0, num_rows, ROWS_PER_BLOCK)
        if key_positions.ndim > 1 or (key_positions.diff() < 0).any():
            return [_Cut(first, min(first + ROWS_PER_BLOCK, num_rows), num_keys) for first in starts]
        if num_rows == num_keys and torch.equal(queries, key_positions) and (queries.diff() > 0).all():
            return [_Cut(0, num_rows, num_keys, is_whole=True)]
        largest = torch.stack([queries[first : first + ROWS_PER_BLOCK].max() for first in starts])
        cuts = torch.searchsorted(key_positions, largest, right=True).tolist()
        ends = [min(first + ROWS_PER_BLOCK, num_rows) for first in starts]
        return [_Cut(*block) for block in zip(starts, ends, cuts, strict=True)]


class Recorded:
    """Another plan's visibility, with the attention weights of some layers handed to a listener on the way.

    `listen(layer, weights)` gets weights (H * G, s, T) float32 for consecutive blocks of s query rows, in
    order.
    """

    def __init__(
        self, plan: ByPosition, layers: frozenset[int], listen: Callable[[int, Tensor], None]
    ) -> None:
        self.plan = plan
        self.layers = layers
        self.listen = listen

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        if layer not in self.layers:
            return self.plan.attend(layer, query, keys, values, heads)
        key_positions = self.plan.key_positions(layer)
        rows_per_block = max(1, WEIGHTS_PER_BLOCK // (query.shape[0] * keys.shape[1]))
        outputs = []
        for first in range(0, query.shape[1], rows_per_block):
            rows = slice(first, first + rows_per_block)
            mask = _mask(key_positions, self.plan.query_positions[rows])
            weights = attention_weights(query[:, rows], keys, mask, heads)
            self.listen(layer, weights)
            outputs.append(_weighted(weights, values))
        return torch.cat(outputs, 1).to(query.dtype)


class Watched:
    """Another plan's visibility, with each layer's queries handed to a listener before they attend.

    `watch(layer, query, heads)` gets the rotated queries (H * G, S, D).
    """

    def __init__(self, plan: Plan, watch: Callable[[int, Tensor, Heads], None]) -> None:
        self.plan = plan
        self.watch = watch

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        self.watch(layer, query, heads)
        return self.plan.attend(layer, query, keys, values, heads)


class Packed:
    """Several sequences in one row of tokens, each seeing a shared header (the first keys) and its own past.

    `lengths` are the sequences' token counts; the keys are header rows and then the sequences, the queries
    only the sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        num_header = keys.shape[1] - query.shape[1]
        outputs, first = [], 0
        for length in self.lengths:
            rows = slice(first, first + length)
            own = slice(num_header + first, num_header + first + length)
            seen_keys = torch.cat([keys[:, :num_header], keys[:, own]], 1)
            seen_values = torch.cat([values[:, :num_header], values[:, own]], 1)
            outputs.append(attend_last(query[:, rows], seen_keys, seen_values, heads))
            first += length
        return torch.cat(outputs, 1)


def attend_last(query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
    """Attention of the last S of T tokens: query i sees the keys up to T - S + i.

    Where S is at least half of T, empty queries fill up the square: the kernel's own causal mask then does T
    * T / 2 of work, a mask given to it S * T.
    """
    num_rows, num_keys = query.shape[1], keys.shape[1]
    if heads.is_plain and num_rows == 1:
        return _sdpa(query, keys, values, heads.scaling)
    if heads.is_plain and num_keys <= 2 * num_rows:
        square = F.pad(query, (0, 0, num_keys - num_rows, 0)) if num_keys > num_rows else query
        return _sdpa(square, keys, values, heads.scaling, is_causal=True)[:, num_keys - num_rows :]
    places = torch.arange(num_keys, device=query.device)
    return attend(query, keys, values, _mask(places, places[num_keys - num_rows :]), heads)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """Attention output (H * G, S, D) under `mask`, bool (S, T) or (H, S, T), True where a query sees a
    key.
    """
    if heads.is_plain:
        return _sdpa(query, keys, values, heads.scaling, mask=mask)
    return _weighted(attention_weights(query, keys, mask, heads), values).to(query.dtype)


def attention_weights(query: Tensor, keys: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """Softmax weights (H * G, S, T) in float32; with sinks the rows sum to less than 1."""
    num_heads, num_rows, _ = query.shape
    if query.dtype == torch.float16:  # q.k may lie beyond its range where the scaled score does not
        query, keys = query.float(), keys.float()
    grouped = query.reshape(
        keys.shape[0], -1, query.shape[-1]
    )  # (H, G * S, D): no copy of the keys per query head
    scores = (grouped @ keys.transpose(1, 2)).float().mul_(heads.scaling).view(num_heads, num_rows, -1)
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    # not -inf: a row that sees no key would become NaN; such rows get no weights, as from SDPA
    scores = scores.masked_fill(~_per_query_head(mask, num_heads), torch.finfo(torch.float32).min)
    if heads.sinks is None:
        weights = scores.softmax(-1)
        is_seeing = mask.any(-1, keepdim=True)
        return weights if is_seeing.all() else weights * _per_query_head(is_seeing, num_heads)
    sinks = heads.sinks.float().view(-1, 1, 1).expand(-1, num_rows, 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    num_heads, num_rows, num_keys = weights.shape
    grouped = weights.reshape(values.shape[0], -1, num_keys)
    return (grouped @ values.float()).view(num_heads, num_rows, -1)


def _mask(key_positions: Tensor, query_positions: Tensor) -> Tensor:
    """(S, T), or (H, S, T) for key positions (H, T): True where the key stands at or before the query."""
    return key_positions.unsqueeze(-2) <= query_positions.unsqueeze(-1)


def _per_query_head(mask: Tensor, num_heads: int) -> Tensor:
    """A mask (S, T), or per kv head (H, S, T), in a shape that broadcasts to (H * G, S, T)."""
    if mask.ndim == 2:
        return mask[None]
    return mask.repeat_interleave(num_heads // mask.shape[0], 0)


def _sdpa(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=None if mask is None else _per_query_head(mask, query.shape[0])[None],
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query.shape[0] > keys.shape[0],
    )[0]
