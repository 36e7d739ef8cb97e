"""RPC (NeurIPS 2025): while a chain of thought grows, keep what its last queries attend to.

Every 1,024 generated tokens, the last 32 queries' attention over the generated tokens before them, softmax
over these alone, is averaged over queries and all heads and pooled over 7 neighbours; the best share `keep`
of all generated so far stays, with the last 32; one set per layer. The prompt is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.compressors.base import Growing, compressors
from kvloom.compressors.snapkv import pooled
from kvloom.observe import Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe

KERNEL = 7


@compressors.register("rpc")
@dataclass(frozen=True, kw_only=True)
class RPC(Growing):
    """Scores generated rows by the attention of the last ones."""

    keep: float = 0.25

    @property
    def records(self) -> Records:
        return Records(window=self.recent)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        return recent_attention(probe, layer, self.recent)


def recent_attention(probe: CacheProbe, layer: int, size: int) -> Tensor:
    """(1, T): what the last `size` queries attend to among the candidates, averaged over heads, pooled."""
    seen = probe.window(layer, size, support="candidates").mean(2).mean((0, 1), keepdim=True)
    others = ~probe.is_candidate(layer)
    return pooled(seen, KERNEL, without=others if others.ndim == 1 else others[:1]).mean(1)
