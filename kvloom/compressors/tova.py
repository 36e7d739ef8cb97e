"""TOVA (EMNLP 2024): keep what the last query attends to, averaged over all heads; one set per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.compressors.base import Compressor, compressors, last_rows
from kvloom.observe import Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("tova")
@dataclass(frozen=True, kw_only=True)
class TOVA(Compressor):
    """Scores keys by the attention of the last query."""

    @property
    def records(self) -> Records:
        return Records(window=1)

    def protected(self, probe: CacheProbe) -> Tensor:
        return last_rows(probe, 1)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        return probe.window(layer, 1).mean((0, 1))
