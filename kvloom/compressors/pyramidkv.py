"""PyramidKV (2024): SnapKV's score, with budgets that fall from the first layer to the last.

With cap - window places per layer on average, the last layer gets a `beta`-th of that and the first as much
more than the average as the last has less; in between they fall by equal steps (KVCache-Factory's code).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.compressors.base import compressors, rounded
from kvloom.compressors.snapkv import SnapKV

if TYPE_CHECKING:
    from kvloom.cache_probe import CacheProbe


@compressors.register("pyramidkv")
@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Scores as SnapKV; deep layers keep less."""

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(2, beta=self.beta)

    def budgets(self, probe: CacheProbe, total: int) -> list[int]:
        mean, room = total - self.window, probe.num_rows - self.window
        if mean <= 0 or probe.num_layers == 1:
            return [total] * probe.num_layers
        least = mean // self.beta
        most = 2 * mean - least
        if most > room:  # the first layers cannot hold more than there is: the last ones get the rest
            least, most = 2 * mean - room, room
        return falling(most, least, probe.num_layers, mean, self.window)


def falling(most: int, least: int, num_layers: int, mean: int, window: int) -> list[int]:
    """Budgets from `most` to `least` plus the window, whose sum is that of equal ones, to the last place."""
    exact = [most - (most - least) * layer / (num_layers - 1) for layer in range(num_layers)]
    return [share + window for share in rounded(exact, mean * num_layers)]
