"""H2O (NeurIPS 2023): keep the heavy hitters, keys that received most attention from all queries so far.

Of the budget, a share `recent` goes to the last tokens and the rest to the heaviest; both halves are equal in
the authors' code. The sums are taken while the prompt is computed, block by block, under the causal mask (in
several re-implementations the mask is missing outside a window): the matrix of all weights is never held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.compressors.base import Compressor, compressors, last_rows
from kvloom.errors import MethodError
from kvloom.observe import Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Compressor):
    """Scores keys by the attention received."""

    recent_share: float = 0.5  # of the budget, for the last tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent_share <= 1:
            raise MethodError(f"h2o: recent_share must lie from 0 to 1, got {self.recent_share}")

    @property
    def records(self) -> Records:
        return Records(received=True)

    def protected(self, probe: CacheProbe) -> Tensor:
        return last_rows(probe, int(self.recent_share * int(self.keep * probe.num_rows + 1e-9)))

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        return probe.received(layer).mean(1)
