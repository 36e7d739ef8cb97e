"""What a model computes, by one forward with nothing of kvloom's caches: the reference of compression.

Dropped rows are rows that no later query sees, so a compressed history is one forward under a mask of its own
for every layer and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvloom.attention import Heads
    from kvloom.cache import SplicedCache
    from kvloom.loom import Loom

REMOVED = 1e-5
"""Largest relative difference between a cache without rows and one whose rows are masked, in float32."""


class Masked:
    """A plan: query i sees key j where visible[layer][head, i, j]; scores, an additive -inf, one softmax."""

    def __init__(self, visible: list[Tensor]) -> None:
        self.visible = visible  # L x (H, T, T) bool
        self.queries: list[Tensor] = []  # L x (H, G, T, D)
        self.keys: list[Tensor] = []  # L x (H, T, D)
        self.values: list[Tensor] = []
        self.weights: list[Tensor] = []  # L x (H, G, T, T)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        grouped = query.unflatten(0, (len(keys), -1))
        scores = torch.einsum("hgsd,htd->hgst", grouped, keys) * heads.scaling
        if heads.softcap is not None:
            scores = (scores / heads.softcap).tanh() * heads.softcap
        scores = scores + torch.where(self.visible[layer], 0.0, -torch.inf)[:, None]
        if heads.sinks is not None:
            sinks = heads.sinks.view(len(keys), -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        self.queries.append(grouped)
        self.keys.append(keys)
        self.values.append(values)
        self.weights.append(weights)
        return torch.einsum("hgst,htd->hgsd", weights, values).flatten(0, 1)


@dataclass
class Plain:
    """All of one forward."""

    logits: Tensor  # (T, V)
    states: Tensor  # (L, T, d) after each layer, on the residual stream
    normed: Tensor  # (T, d) after the final norm
    queries: list[Tensor]  # L x (H, G, T, D), rotated
    keys: list[Tensor]  # L x (H, T, D), rotated
    values: list[Tensor]
    weights: list[Tensor]  # L x (H, G, T, T)


@torch.no_grad()
def plain(loom: Loom, ids: Tensor, visible: list[Tensor] | None = None) -> Plain:
    """The forward of ids (T,), causal unless `visible` says who sees whom."""
    decoder = loom.decoder
    if visible is None:
        visible = history(loom, len(ids), [])
    masked, heard = Masked(visible), []

    def hear(_: Any, __: Any, output: Any) -> None:
        heard.append((output[0] if isinstance(output, tuple) else output)[0])

    layers = getattr(decoder.body, decoder._layers_attribute)
    hooks = [layer.register_forward_hook(hear) for layer in layers]
    try:
        output = loom.model(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            output_hidden_states=True,
            kvloom=masked,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return Plain(
        output.logits[0],
        torch.stack(heard),
        output.hidden_states[-1][0],
        masked.queries,
        masked.keys,
        masked.values,
        masked.weights,
    )


def history(loom: Loom, num_rows: int, drops: list[tuple[int, list[Tensor]]]) -> list[Tensor]:
    """L x (H, T, T) bool: causal; and for each (n, rows left), queries from row n on see of the n rows before
    only those left, L x (H, S) or L x (1, S).
    """
    visible = []
    for layer, shape in enumerate(loom.decoder.kv_shapes):
        seen = torch.ones(num_rows, num_rows, dtype=torch.bool).tril().repeat(shape.num_heads, 1, 1)
        for first, left in drops:
            for head in range(shape.num_heads):
                rows = left[layer][min(head, len(left[layer]) - 1)].tolist()
                gone = sorted(set(range(first)) - set(rows))
                seen[head, first:, gone] = False
        visible.append(seen)
    return visible


def rows_left(cache: SplicedCache) -> list[Tensor]:
    """L x (H, S): the rows that each layer's heads hold."""
    num_heads = [cache.keys(layer).shape[0] for layer in range(len(cache.layers))]
    return [
        torch.arange(cache.num_rows).expand(heads, -1) if layer.rows is None else layer.rows.clone()
        for layer, heads in zip(cache.layers, num_heads, strict=True)
    ]


def sets(rows: list[Tensor]) -> list[list[list[int]]]:
    """Rows by layer and head, to be compared."""
    return [[sorted(head.tolist()) for head in layer] for layer in rows]


def random_ids(num: int, seed: int = 1, *, vocab: int = 256) -> Tensor:
    return torch.randint(0, vocab, (num,), generator=torch.Generator().manual_seed(seed))


def best(score: Tensor, number: int, allowed: list[int]) -> list[int]:
    """The `number` rows of highest score (T,) among those allowed, the lower row where they tie."""
    values = score.tolist()
    return sorted(sorted(allowed, key=lambda row: (-values[row], row))[:number])


def pooled_by_hand(score: Tensor, kernel: int, allowed: list[int], pool: str = "avg") -> Tensor:
    """(T,) of (T,): mean or maximum over `kernel` neighbours among `allowed`, a run of rows; zeros beyond."""
    half, values = kernel // 2, dict(zip(allowed, score[allowed].tolist(), strict=True))
    out = torch.zeros_like(score)
    for row in allowed:
        near = [values.get(n, 0.0) for n in range(row - half, row + half + 1)]
        out[row] = sum(near) / kernel if pool == "avg" else max(near)
    return out


def entropy_by_hand(logits: Tensor, k: int = 256, *, renormalize: bool = True) -> Tensor:
    """(T,) nats: of the distribution that predicted each of T tokens, the first's being the others' mean;
    logits (T, V) are those after each token.
    """
    found = []
    for row in logits[:-1].double():
        shares = row.softmax(0).sort(descending=True).values[:k]
        if renormalize:
            shares = shares / shares.sum()
        found.append(float(-(shares[shares > 0] * shares[shares > 0].log()).sum()))
    return torch.tensor([sum(found) / len(found), *found])


def drift_by_hand(states: Tensor, last: Tensor) -> Tensor:
    """(L, T): 1 - cos(states (L, T, d), last (T, d))."""
    states, last = states.double(), last.double()
    dot = (states * last).sum(-1)
    return (1 - dot / (states.pow(2).sum(-1).sqrt() * last.pow(2).sum(-1).sqrt())).float()
