"""No recompute: spliced chunks are used as they are; the line that every method must beat.

`layout` offers the positions of other systems that never recompute and whose models are tuned for it; on a
model that is not, expect worse answers than with the global positions:

    global       as in a full prefill (TurboRAG's reordered positions)
    pcw          all chunks at the same positions, the question right after the longest (Parallel Context
    Windows) composite    all chunks at the same positions, the question after the total length (TurboRAG's
    composite positions)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from kvloom.errors import MethodError
from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.probe import Probe

PLACEMENTS = {"global": "global", "pcw": "hl-hp", "composite": "hl-tp"}


@selectors.register("none")
@dataclass(frozen=True, kw_only=True)
class NoRecompute(Selector):
    """Recomputes no row."""

    ratio: float = field(default=0.0, init=False, repr=False)
    layout: Literal["global", "pcw", "composite"] = "global"

    def __post_init__(self) -> None:
        if self.layout not in PLACEMENTS:
            raise MethodError(f"none: layout must be one of {', '.join(PLACEMENTS)}, got {self.layout!r}")

    @property
    def placement(self) -> str:
        return PLACEMENTS[self.layout]

    def score(self, probe: Probe) -> Tensor:
        return torch.zeros(probe.num_rows)
