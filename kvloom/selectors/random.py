"""Random rows, seeded: the control that a method must beat to be worth its scoring pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.errors import MethodError
from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from kvloom.probe import Probe


@selectors.register("random")
@dataclass(frozen=True, kw_only=True)
class Random(Selector):
    """Scores rows by a random number; the same seed and context length give the same rows."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise MethodError(f"random: seed must be a whole number in 0..2^63-1, got {self.seed!r}")

    def score(self, probe: Probe) -> Tensor:
        return torch.rand(probe.num_rows, generator=torch.Generator().manual_seed(self.seed))
