"""Expected Attention (2025): keep the keys that future queries are expected to attend to.

Queries before RoPE are taken as normally distributed, with the mean and covariance of the prompt's own (its
first four left out). Rotated to a position ahead and averaged over the next `ahead` positions, they give
each key the expectation of the exponential of its score, ``exp(k.m / sqrt(D) + k.C.k / 2D)``; normalised over
all keys but the first four, it is weighted by the norm of the key's value. Sees no single query; the first
four tokens stay. After kvpress's implementation, whose defaults these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.compressors.base import Compressor, compressors
from kvloom.errors import MethodError
from kvloom.observe import NUM_SINKS, Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("expected_attention")
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Compressor):
    """Scores keys by the attention expected of later queries."""

    ahead: int = 512  # positions that later queries are averaged over
    epsilon: float = 0.0  # added to the attention before it is weighted by the value's norm

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, ahead=self.ahead)
        if not 0 <= self.epsilon < math.inf:
            raise MethodError(
                f"expected_attention: epsilon must be 0 or a positive number, got {self.epsilon}"
            )

    @property
    def records(self) -> Records:
        return Records(moments=True)

    def protected(self, probe: CacheProbe) -> Tensor:
        return torch.arange(probe.num_rows) < NUM_SINKS

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        keys, values = probe.keys(layer).float(), probe.values(layer).float()
        mean, covariance = probe.query_moments(layer)
        ahead = probe.next_position + torch.arange(self.ahead, device=keys.device)
        turn = probe.rotations(ahead).mean(0)  # (D, D)
        num_heads, scaling = len(keys), probe.scaling(layer)
        mean = (mean @ turn).unflatten(0, (num_heads, -1))  # (H, G, D)
        covariance = (turn.T @ covariance @ turn).unflatten(0, (num_heads, -1))  # (H, G, D, D)
        linear = torch.einsum("htd,hgd->hgt", keys, mean) * scaling
        spread = torch.einsum("htd,hgde,hte->hgt", keys, covariance, keys) * (scaling**2 / 2)
        is_sink = (probe.rows(layer) < NUM_SINKS).view(-1, 1, keys.shape[1])
        attention = (linear + spread).masked_fill(is_sink, -torch.inf).softmax(-1).mean(1)  # (H, T)
        return (attention + self.epsilon) * values.norm(dim=-1)
