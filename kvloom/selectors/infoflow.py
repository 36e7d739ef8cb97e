"""InfoFlow KV (arXiv 2603.05353): recompute the rows that the question attends to most, under global
positions.

Section numbers are the paper's. The score of a context token is the attention that the question's tokens pay
it in the spliced cache, keys at their global positions (the GLOBAL geometry of Table 1), averaged over heads
and over a set of layers. Two reductions over question tokens: "norm", sqrt(sum of squares), is what the
authors' code runs; "mass", the plain sum, is the paper's Eq. 7.

Deviations from the authors' code: scores are causal among question tokens; no budget goes to rows that are
exact already (header and first chunk). Two defaults are ours, as measured (docs/results/reuse.md): all tokens
after the chunks ask, instruction included, not the raw question's alone (`query="question"`); and all layers
from a quarter of the depth up are scored, not the band 22-25 of 40 that was tuned on one model
(`layers="paper"`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from kvloom.errors import MethodError
from kvloom.layout import LAYOUTS
from kvloom.probe import QUERIES, REDUCTIONS, Probe
from kvloom.selectors.base import Selector, selectors

if TYPE_CHECKING:
    from collections.abc import Collection

Layers = str | tuple[int, ...] | tuple[float, float]


@selectors.register("infoflow")
@dataclass(frozen=True, kw_only=True)
class InfoFlow(Selector):
    """Scores rows by the question's attention to them."""

    reduction: Literal["norm", "mass", "entropy", "values", "combined"] = "norm"
    layers: Layers = "0.25-1"  # "paper", a band FROM-TO in shares of the depth, or layer indices "17,18,19"
    query: Literal["question", "suffix"] = "suffix"  # all after the chunks, or the raw question's tokens
    geometry: Literal["global", "hl-hp", "hl-tp", "tl-tp"] = "global"  # positions while scoring
    weight: Literal["none", "deviation"] = (
        "none"  # times the change of the row's layer-1 values, as CacheBlend's
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("reduction", (*REDUCTIONS, "combined"))
        self._check("query", QUERIES)
        self._check("geometry", LAYOUTS)
        self._check("weight", ("none", "deviation"))
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        _parse_layers(self.layers)

    def _check(self, option: str, allowed: Collection[str]) -> None:
        if getattr(self, option) not in allowed:
            value = getattr(self, option)
            raise MethodError(f"infoflow: {option} must be one of {', '.join(allowed)}, got {value!r}")

    @property
    def fresh_layers(self) -> int:
        return DEVIATION_LAYER + 1 if self.weight == "deviation" else 0

    def score(self, probe: Probe) -> Tensor:
        score = self._score(probe, self.geometry)
        return score * probe.deviation(DEVIATION_LAYER).sqrt() if self.weight == "deviation" else score

    def _score(self, probe: Probe, geometry: str) -> Tensor:
        reductions = COMBINED if self.reduction == "combined" else (self.reduction,)
        layers = resolve_layers(self.layers, probe.num_layers)
        scores = probe.reduced(*reductions, geometry=geometry, layers=layers, query=self.query).mean(1)
        return scores[0] if len(scores) == 1 else _rescaled(scores).mean(0)

    def order(self, probe: Probe) -> list[int]:
        """Chunks by hit rate under HL-TP, richest last, next to the question (section 4.3).

        The hit rate is the share of a group's rows among the best `ratio` of all rows, exact ones included;
        ties keep their order. Groups move as wholes.
        """
        scores = self._score(probe, "hl-tp")
        is_hit = torch.zeros(probe.num_rows)
        is_hit[scores.sort(descending=True, stable=True).indices[: self.budget(probe)]] = 1
        rates = []
        for group in probe.groups:
            rows = torch.cat([is_hit[probe.spans[index].start : probe.spans[index].stop] for index in group])
            rates.append(float(rows.mean()))
        ranked = sorted(range(len(rates)), key=rates.__getitem__)
        return [index for place in ranked for index in probe.groups[place]]


DEVIATION_LAYER = 1
"""The first layer whose stored values differ from those of a full prefill."""

COMBINED = ("entropy", "norm", "values")
"""What the authors' "combined" score averages, each scaled to 0..1 over the context."""


def _rescaled(scores: Tensor) -> Tensor:
    """Each row of (R, T) scaled to 0..1; a constant row becomes 0."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    return (scores - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)


def resolve_layers(layers: Layers, num_layers: int) -> tuple[int, ...]:
    """Layer indices, ascending. A band takes the layers l with from <= l / L < to, and at least one.

    Raises ``MethodError`` for what is neither a band within 0..1 nor indices of the model's layers.
    """
    parsed = _parse_layers(layers)
    if isinstance(parsed, Band):
        first = min(math.ceil(parsed.start * num_layers - 1e-9), num_layers - 1)
        last = max(math.ceil(parsed.stop * num_layers - 1e-9), first + 1)
        return tuple(range(first, last))
    if max(parsed) >= num_layers:
        raise MethodError(f"infoflow: layers {layers!r}, but the model has layers 0 to {num_layers - 1}")
    return parsed


class Band(NamedTuple):
    """A range of layers in shares of the depth."""

    start: float
    stop: float


def _parse_layers(layers: Layers) -> Band | tuple[int, ...]:
    problem = MethodError(
        f"infoflow: layers must be 'paper', a band such as '0.25-1' in shares of the depth, or indices "
        f"such as '17,18', "
        f"got {layers!r}"
    )
    if layers == "paper":
        return PAPER_BAND
    if isinstance(layers, str):
        separator, kind = (",", int) if "-" not in layers.lstrip("-") else ("-", float)
        try:
            parts: list[int] | list[float] = [kind(part) for part in layers.split(separator)]
        except ValueError:
            raise problem from None
        is_band = separator == "-"
    elif not isinstance(layers, tuple | list):
        raise problem
    else:
        parts = list(layers)
        is_band = any(isinstance(part, float) for part in parts)
    if is_band:
        if len(parts) != 2 or not 0 <= parts[0] < parts[1] <= 1:
            raise problem
        return Band(*parts)
    if not parts or any(not isinstance(part, int) or part < 0 for part in parts):
        raise problem
    return tuple(sorted(set(parts)))  # type: ignore[arg-type]


PAPER_BAND = Band(0.55, 0.65)
"""Layers 22-25 of Qwen3-14B's 40, the paper's choice, as shares of the depth."""
