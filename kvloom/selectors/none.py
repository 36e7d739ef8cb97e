"""No recompute: chunks are spliced at their global positions and used as they are; the line every method
must beat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from kvloom.probe import Probe


@selectors.register("none")
@dataclass(frozen=True, kw_only=True)
class NoRecompute(Selector):
    """Recomputes no row."""

    ratio: float = field(default=0.0, init=False, repr=False)

    def score(self, probe: Probe) -> Tensor:
        return torch.zeros(probe.num_rows)
