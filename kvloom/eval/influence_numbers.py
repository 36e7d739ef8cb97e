"""Numbers of an influence report that need more than a paired mean: reach, crossing points, and what single
rows' influence goes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from kvloom.eval.comparison import SEED
from kvloom.eval.continuations import far, near
from kvloom.eval.paired import RESAMPLES
from kvloom.eval.statistics import Interval, gap_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvloom.eval.paired import Curves

PREDICTORS = ("log attention", "entropy", "position", "log value norm")
_REGRESSIONS = 2000
_LEAST = 1e-12  # below it an influence is rounding, and its logarithm would say nothing
_MIN_SINGLES = 8  # twice as many as predictors


def reach(curves: Sequence[Sequence[float]]) -> Interval:
    """Far over near, a ratio of means over documents, with its interval."""
    nearest, farthest = ([f(list(curve)) for curve in curves] for f in (near, far))
    if sum(nearest) <= 0:
        return Interval(float("nan"), float("nan"), float("nan"), "nothing changes near")
    # 1 - the share of a gap closed is the ratio of sums that is wanted, and its bootstrap is paired
    share = gap_closed(nearest, farthest, seed=SEED, resamples=RESAMPLES)
    return Interval(1 - share.mean, 1 - share.high, 1 - share.low, share.reason)


@dataclass(frozen=True)
class Crossing:
    """The token from which one curve stays above another, in the mean and in resamples of documents."""

    token: float  # inf: never
    low: float
    high: float
    share_never: float  # of resamples


def crossing(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], chunk: int) -> Crossing:
    """From where on the mean of a's curves is above that of b's, to the end."""
    left, right = np.asarray(a), np.asarray(b)  # (documents, chunks)
    rng, number = np.random.default_rng(SEED), len(left)
    drawn = rng.integers(number, size=(RESAMPLES, number))
    found = _crossings((left - right)[drawn].mean(1)) * chunk
    (token,) = _crossings((left - right).mean(0)[None]) * chunk
    # without interpolation, which between infinite values is not a number
    low = float(np.quantile(found, 0.025, method="lower"))
    high = float(np.quantile(found, 0.975, method="higher"))
    return Crossing(float(token), low, high, float(np.isinf(found).mean()))


def _crossings(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """(R,): the first chunk from which all differences (R, chunks) are above 0; inf where there is none."""
    stays = np.logical_and.accumulate((differences > 0)[:, ::-1], axis=1)[:, ::-1]
    return np.where(stays.any(1), stays.argmax(1), inf)


def crossing_text(found: Crossing, num_documents: int) -> str:
    """The crossing in words."""
    point = "never" if isinf(found.token) else f"from token {found.token:,.0f} on"
    if num_documents < 2:
        return point
    ends = ["never" if isinf(end) else f"{end:,.0f}" for end in (found.low, found.high)]
    return f"{point} [{ends[0]}, {ends[1]}]; never in {found.share_never:.0%} of resamples"


def regression(
    singles: Sequence[dict[str, Any]], of: Callable[[list[float]], float]
) -> list[Interval] | None:
    """How the logarithm of single rows' influence goes with each predictor, the others held: coefficients per
    standard deviation within documents, with intervals over documents; None for too few rows.
    """
    if len(singles) < _MIN_SINGLES:
        return None
    documents = sorted({line["document"] for line in singles})
    parts = [_within([line for line in singles if line["document"] == name], of) for name in documents]
    scale = np.sqrt(np.concatenate([x for x, _ in parts]).var(0))
    if (scale == 0).any():
        return None
    products = np.stack([(x / scale).T @ (x / scale) for x, _ in parts])  # (documents, 4, 4)
    targets = np.stack([(x / scale).T @ y for x, y in parts])  # (documents, 4)
    if np.linalg.cond(products.sum(0)) > 1e8:
        return None
    means = np.linalg.solve(products.sum(0), targets.sum(0))
    rng = np.random.default_rng(SEED)
    drawn = rng.integers(len(parts), size=(_REGRESSIONS, len(parts)))
    found = np.stack([np.linalg.pinv(products[row].sum(0)) @ targets[row].sum(0) for row in drawn])
    ends = np.quantile(found, (0.025, 0.975), axis=0)
    is_one = len(parts) == 1
    return [
        Interval(float(mean), float("nan") if is_one else float(low), float("nan") if is_one else float(high))
        for mean, low, high in zip(means, *ends, strict=True)
    ]


def _within(
    lines: Sequence[dict[str, Any]], of: Callable[[list[float]], float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Predictors (N, 4) and log influence (N,) of one document's rows, less the document's means."""
    x = np.array(
        [
            [
                np.log(max(line["attention"], _LEAST)),
                line["entropy"],
                line["mean_position"],
                np.log(max(line["value_norm"], _LEAST)),
            ]
            for line in lines
        ]
    )
    y = np.array([np.log(max(of(line["kl"]), _LEAST)) for line in lines])
    return x - x.mean(0), y - y.mean()


def without_largest(values: Sequence[float]) -> tuple[float, float]:
    """The share of the sum that the largest value has, and the mean of the others."""
    rest = sorted(values)[:-1]
    total = sum(values)
    return (max(values) / total if total > 0 else float("nan")), sum(rest) / len(rest) if rest else float(
        "nan"
    )


def by_label(curves: Curves, labels: Sequence[str]) -> Curves:
    """Those of the curves that are there, in the order of the labels."""
    return {label: curves[label] for label in labels if label in curves}
