"""InfoFlow KV (arXiv 2603.05353): recompute the rows that the question attends to most, under global
positions.

Section numbers are the paper's. The score of a context token is the attention that the question's tokens pay
it in the spliced cache, keys at their global positions (the GLOBAL geometry of Table 1), averaged over heads
and over a set of layers. Two reductions over question tokens: "norm", sqrt(sum of squares), is what the
authors' code runs; "mass", the plain sum, is the paper's Eq. 7.

Deviations from the authors' code: scores are causal among question tokens; no budget goes to rows that are
exact already (header and first chunk); the default scores all layers from a quarter of the depth up instead
of the band 22-25 of 40 that was tuned on one model (`layers="paper"`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvloom.errors import MethodError
from kvloom.probe import REDUCTIONS, Probe
from kvloom.selectors.base import Selector, selectors

Layers = str | tuple[int, ...] | tuple[float, float]


@selectors.register("infoflow")
@dataclass(frozen=True, kw_only=True)
class InfoFlow(Selector):
    """Scores rows by the question's attention to them."""

    reduction: Literal["norm", "mass"] = "norm"
    layers: Layers = "0.25-1"  # "paper", a band FROM-TO in shares of the depth, or layer indices "17,18,19"
    query: Literal["question", "suffix"] = (
        "question"  # whose attention: the raw question's tokens, or all after the chunks
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in REDUCTIONS:
            raise MethodError(
                f"infoflow: reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}"
            )
        if self.query not in ("question", "suffix"):
            raise MethodError(f"infoflow: query must be question or suffix, got {self.query!r}")
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        _parse_layers(self.layers)

    def score(self, probe: Probe) -> Tensor:
        layers = resolve_layers(self.layers, probe.num_layers)
        scores = probe.reduced(self.reduction, layers=layers, query=self.query)
        return torch.stack([scores[layer] for layer in layers]).mean(0)


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
