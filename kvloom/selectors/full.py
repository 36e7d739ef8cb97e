"""Full prefill: nothing is reused and every row is computed; the reference for quality and for time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from kvloom.probe import Probe


@selectors.register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Selector):
    """Prefills the whole prompt."""

    ratio: float = field(default=1.0, init=False, repr=False)
    reuses: ClassVar[bool] = False

    def score(self, probe: Probe) -> Tensor:
        return torch.ones(probe.num_rows)
