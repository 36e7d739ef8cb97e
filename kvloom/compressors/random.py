"""Random eviction: the control that every other method must beat.

Uniform for each kv head; the first `first` and the last `last` tokens of a prompt stay, as in Random
Attention (arXiv 2609.03430), whose authors report it on a par with the best methods for long reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvloom.compressors.base import Growing, compressors, last_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("random")
@dataclass(frozen=True, kw_only=True)
class RandomEviction(Growing):
    """Scores by chance; the same seed gives the same rows."""

    seed: int = 0
    first: int = 4
    last: int = 64

    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(0, seed=self.seed, first=self.first, last=self.last)

    def protected(self, probe: CacheProbe) -> Tensor:
        return last_rows(probe, self.last) | (torch.arange(probe.num_rows) < self.first)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        # one stream per layer and length, so that neither another layer nor an earlier call shifts it
        seed = (self.seed * 1009 + layer) * 1_000_003 + probe.num_rows
        generator = torch.Generator().manual_seed(seed % 2**63)
        keys = probe.keys(layer)
        return torch.rand(keys.shape[:2], generator=generator).to(keys.device)
