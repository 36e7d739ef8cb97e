"""Selector: a score for each context row; `select` spends the budget on the best of those that are not exact
yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from kvloom.errors import MethodError
from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvloom.probe import Probe

selectors: Registry[Selector] = Registry("selector", "kvloom.selectors")


@dataclass(frozen=True, kw_only=True)
class Selector(ABC):
    """Base of all methods that choose rows. Raises ``MethodError`` for a ratio outside 0..1."""

    ratio: float = 0.15  # share of the context rows (header and chunks) that is recomputed

    name: ClassVar[str]
    reuses: ClassVar[bool] = True  # False: nothing is spliced, the whole prompt is prefilled

    def __post_init__(self) -> None:
        if (
            isinstance(self.ratio, bool)
            or not isinstance(self.ratio, int | float)
            or not 0 <= self.ratio <= 1
        ):
            raise MethodError(
                f"{self.name}: ratio is the share of rows to recompute, from 0 to 1, got {self.ratio}"
            )

    @property
    def recipe(self) -> str:
        """The name and the options that differ from their defaults, for people; `repr` has them all."""
        options = [field for field in fields(self) if field.init]
        share = [f"{self.ratio:.0%}" for field in options if field.name == "ratio"]
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in options
            if field.name != "ratio" and getattr(self, field.name) != field.default
        ]
        return " ".join([self.name, *share, *changed])

    @abstractmethod
    def score(self, probe: Probe) -> Tensor:
        """(T,) float32, one per context row, higher = recompute first."""

    def order(self, probe: Probe) -> list[int]:
        """Chunk indices in the order in which the context should be read; chunks of a group stay together.

        Raises ``MethodError`` unless the method defines one.
        """
        raise MethodError(f"{self.name} does not reorder documents; infoflow does")

    @property
    def placement(self) -> str:
        """Name of the positions at which chunks are spliced; see `kvloom.layout`."""
        return "global"

    @property
    def fresh_layers(self) -> int:
        """The first layers whose freshly computed KV, of all rows, replaces the stored one before
        recomputing.
        """
        return 0

    def budget(self, probe: Probe) -> int:
        """Rows to recompute; at least one for any ratio above 0, so that a short context is repaired at
        all.
        """
        return max(1, int(self.ratio * probe.num_rows + 1e-9)) if self.ratio else 0


def select(selector: Selector, probe: Probe) -> Tensor:
    """(S,) int64 ascending: the rows with the best scores, never one that is exact; ties go to the earlier
    row.

    Raises ``MethodError`` when the method returns a score of another shape or one that is not a number.
    """
    candidates = (~probe.exact).nonzero().flatten()
    num_rows = min(selector.budget(probe), len(candidates))
    if num_rows == 0:
        return candidates[:0]
    if num_rows == len(candidates):
        return candidates
    scores = selector.score(probe)
    if scores.shape != (probe.num_rows,):
        raise MethodError(
            f"{selector.name}: score has shape {tuple(scores.shape)}, the context has {probe.num_rows} rows"
        )
    if scores.isnan().any():
        raise MethodError(f"{selector.name}: score is not a number for {int(scores.isnan().sum())} rows")
    best = scores[candidates].sort(descending=True, stable=True).indices[:num_rows]
    return candidates[best].sort().values


def as_selector(selector: Selector | str, options: Mapping[str, Any] | None = None) -> Selector:
    """The instance given, or one of the registered name with options as data; ``MethodError`` for others."""
    if isinstance(selector, str):
        return selectors.build(selector, options)
    if not isinstance(selector, Selector):
        raise MethodError(
            f"a selector is a name or an instance such as InfoFlow(ratio=0.15), got {selector!r}"
        )
    if options:
        raise TypeError("options go with a selector's name; an instance has its own")
    return selector
