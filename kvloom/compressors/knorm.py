"""Knorm (EMNLP 2024): keep the keys of the smallest L2 norm, which tend to receive most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.compressors.base import Compressor, compressors

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("knorm")
@dataclass(frozen=True, kw_only=True)
class Knorm(Compressor):
    """Scores keys by minus their norm; sees no query."""

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        return -probe.keys(layer).float().norm(dim=-1)
