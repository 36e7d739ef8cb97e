"""StreamingLLM (ICLR 2024): keep the first tokens, which act as attention sinks, and the most recent ones.

Keys keep their positions here, as everywhere in kvloom; the authors number positions within the cache, which
serves endless streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvloom.compressors.base import Growing, compressors

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(Growing):
    """Scores rows by how late they stand; the first stay."""

    sinks: int = 4

    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(0, sinks=self.sinks)

    def protected(self, probe: CacheProbe) -> Tensor:
        return torch.arange(probe.num_rows) < self.sinks

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        rows = probe.rows(layer)
        return (rows if rows.ndim == 2 else rows[None]).float()
