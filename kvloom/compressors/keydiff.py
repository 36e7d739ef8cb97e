"""KeyDiff (2025): keep the keys least like the others: those of the lowest cosine to the mean of all
directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

from kvloom.compressors.base import Compressor, compressors

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("keydiff")
@dataclass(frozen=True, kw_only=True)
class KeyDiff(Compressor):
    """Scores keys by minus their cosine to the anchor; sees no query."""

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        keys = F.normalize(probe.keys(layer).float(), dim=-1)
        anchor = keys.mean(1, keepdim=True)  # (H, 1, D)
        return -F.cosine_similarity(keys, anchor, dim=-1)
