"""SnapKV (NeurIPS 2024): keep what the prompt's last queries attend to.

The attention of the last `window` queries to each earlier key is averaged over these queries, pooled over
neighbours and averaged over the query heads of a kv head; the best keys of each kv head stay, and so does the
window. Defaults are those of the authors' class (window 64, average pool of 5); their runs on LongBench have
window 32 and maximum pool of 7. They keep a set for each query head, with keys and values repeated for it,
which makes the cache larger where heads share keys; one set for each kv head, as here, does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

from kvloom.compressors.base import Compressor, compressors, last_rows
from kvloom.errors import MethodError
from kvloom.observe import Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(Compressor):
    """Scores keys by the attention of the last queries."""

    window: int = 64  # last tokens, whose queries score and which always stay
    kernel: int = 5  # neighbours pooled, an odd number; 1 for none
    pool: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, window=self.window, kernel=self.kernel)
        self.check_among(pool=(self.pool, ("avg", "max")))
        if self.kernel % 2 == 0:
            raise MethodError(f"{self.name}: kernel must be odd, got {self.kernel}")

    @property
    def records(self) -> Records:
        return Records(window=self.window)

    def protected(self, probe: CacheProbe) -> Tensor:
        return last_rows(probe, self.window)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        seen = probe.window(layer, self.window).mean(2)  # (H, G, T)
        is_window = probe.is_last(layer, self.window)
        return pooled(seen, self.kernel, self.pool, without=is_window).mean(1)


def pooled(attention: Tensor, kernel: int, pool: str = "avg", *, without: Tensor) -> Tensor:
    """(H, G, T): attention (H, G, T) pooled over neighbouring places, zeros beyond the ends.

    Places in `without`, (T,) or (H, T) bool, are no neighbours of the others, and get 0.
    """
    counts = ~without.view(-1, 1, without.shape[-1])
    function = F.avg_pool1d if pool == "avg" else F.max_pool1d
    seen = torch.where(counts, attention, 0)
    return torch.where(counts, function(seen, kernel, stride=1, padding=kernel // 2), 0)
