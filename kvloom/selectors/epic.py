"""EPIC's LegoLink (ICML 2025): recompute the first rows of every chunk, which act as the chunk's own
attention sink.

LegoLink-k recomputes the first k tokens (a constant, 1 to 64 in the authors' code) of every document; `k`
does that. Without `k`, each chunk gets the first `ratio` of its rows, the form that the InfoFlow KV paper
compares with. Chunks that are exact already get no budget, as the system chunk does in EPIC's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.errors import MethodError
from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from kvloom.probe import Probe


@selectors.register("epic")
@dataclass(frozen=True, kw_only=True)
class Epic(Selector):
    """Scores rows by how early they stand in their chunk."""

    k: int | None = None  # rows per chunk; None: `ratio` of each chunk's rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and (not isinstance(self.k, int) or self.k < 1):
            raise MethodError(f"epic: k is a number of rows per chunk and at least 1, got {self.k!r}")

    def budget(self, probe: Probe) -> int:
        if self.k is None:
            return super().budget(probe)
        return sum(min(self.k, len(span)) for span in probe.spans if not probe.exact[span.start])

    def score(self, probe: Probe) -> Tensor:
        score = torch.full((probe.num_rows,), -torch.inf)
        for span in probe.spans:
            places = torch.arange(len(span), dtype=torch.float32)
            score[span.start : span.stop] = -places if self.k is not None else -places / len(span)
        return score
