"""R-KV (2025): while a chain of thought grows, keep what is attended to and not said twice.

Every 128 generated tokens: importance is the attention of the last 8 queries, the largest of a kv head's
query heads, averaged over queries; redundancy is the mean cosine of a key to the others, cosines up to
`threshold` counted as 0, made a share by a softmax; the score is ``mix * importance - (1 - mix) *
redundancy``. The paper has mix 0.1. Its budget is a fixed number of rows; here it is the share `keep` of what
was generated, as for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvloom.compressors.base import Growing, compressors
from kvloom.errors import MethodError
from kvloom.observe import Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("r-kv")
@dataclass(frozen=True, kw_only=True)
class RKV(Growing):
    """Scores generated rows by importance less redundancy."""

    keep: float = 0.25
    mix: float = 0.1
    threshold: float = 0.5
    every: int = 128
    recent: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mix <= 1:
            raise MethodError(f"r-kv: mix must lie from 0 to 1, got {self.mix}")

    @property
    def records(self) -> Records:
        return Records(window=self.recent)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        importance = probe.window(layer, self.recent, support="candidates").amax(1).mean(1)  # (H, T)
        candidates = probe.is_candidate(layer).expand_as(importance)
        keys = F.normalize(probe.keys(layer).float(), dim=-1)
        cosines = keys @ keys.transpose(1, 2)
        cosines = cosines.masked_fill(cosines <= self.threshold, 0)
        cosines.diagonal(dim1=1, dim2=2).zero_()
        cosines = cosines * candidates[:, None, :]
        mean = cosines.sum(-1) / candidates.sum(-1, keepdim=True).clamp_min(1)
        redundancy = mean.masked_fill(~candidates, -torch.inf).softmax(-1)
        return self.mix * importance - (1 - self.mix) * redundancy
