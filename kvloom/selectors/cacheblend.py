"""CacheBlend (EuroSys 2025): recompute the rows whose KV changes most once they see the other chunks.

The first layers, up to the check layer, are computed in full for every row, and their KV replaces the stored
one. The deviation of a row is the squared difference between its fresh and its stored values at the check
layer, summed over heads and channels; the rows that deviate most are recomputed in all layers. Both the full
layers and the rows are counted in token-layers.

Options: `deviation="keys"` compares keys after RoPE at their global positions, as LMCache does; `check_layer`
is 0-based and 1 in the authors' code. Deviations from it: the causal mask is exact (theirs is aligned to the
corner, so chosen rows also see some later ones), the question is always computed in full, and no budget goes
to rows that are exact already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvloom.errors import MethodError
from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.probe import Probe


@selectors.register("cacheblend")
@dataclass(frozen=True, kw_only=True)
class CacheBlend(Selector):
    """Scores rows by how much their values change."""

    deviation: Literal["values", "keys"] = "values"
    check_layer: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deviation not in ("values", "keys"):
            raise MethodError(f"cacheblend: deviation must be values or keys, got {self.deviation!r}")
        if self.check_layer < 1:
            raise MethodError(
                f"cacheblend: check_layer must be at least 1, since layer 0 never deviates, "
                f"got {self.check_layer}"
            )

    @property
    def fresh_layers(self) -> int:
        return self.check_layer + 1

    def score(self, probe: Probe) -> Tensor:
        if self.check_layer >= probe.num_layers:
            raise MethodError(
                f"cacheblend: check_layer is {self.check_layer}, "
                f"but the model has layers 0 to {probe.num_layers - 1}"
            )
        return probe.deviation(self.check_layer, self.deviation)
