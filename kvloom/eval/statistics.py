"""What a number of samples can bear: bootstrap intervals, a paired test, and the share of a gap closed.

All is paired: value i of each array belongs to sample i, and samples are drawn as a whole, so that what makes
a sample hard for every method does not blur the difference between two. Intervals are percentile intervals,
which for fewer than about 20 samples are somewhat too narrow. The same seed gives the same numbers.

A report asks for hundreds of intervals over the same samples, so what was drawn for a number of samples and a
seed is kept: how often each resample holds each sample, and the random signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

_EXACT_SAMPLES = 14  # up to here all sign patterns are tried, at most 16,384
_BLOCK = 1_000_000  # draws in memory at a time
NO_GAP = 1e-9  # nats; what rounding alone makes of none, such as of a single chunk
_KEPT = 4  # drawings; a report goes through its comparisons one after the other


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it. A value that cannot be had is nan, and `reason` says why."""

    mean: float
    low: float
    high: float
    reason: str = ""


@dataclass(frozen=True)
class Difference(Interval):
    """The mean of a - b over samples, and how often chance alone would be as far from 0."""

    p_value: float = nan  # two-sided


def paired_bootstrap(
    values: ArrayLike, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> Interval:
    """The mean of `values` (n,) with its percentile interval over samples drawn with replacement.

    One sample has a mean and no interval. Raises ``ValueError`` for no value, and for one that is not finite.
    """
    values = _values("values", values)
    means = _resampled_means(values[:, None], seed, resamples)[:, 0]
    return Interval(float(values.mean()), *_percentiles(means, means, level, len(values)))


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> Difference:
    """The mean of a - b, (n,) each, with its bootstrap interval and the p-value of a sign-flip test.

    The test asks how often random signs of the differences give a mean as far from 0, which is what to expect
    if it made no difference which method is which. Up to 14 samples that differ, all signs are tried; above,
    `resamples` random ones, the observed one counted among them, so that p is never 0. Raises as
    `paired_bootstrap`, and ``ValueError`` for differing lengths.
    """
    a, b = _values("a", a), _values("b", b)
    _check_pairs(a=a, b=b)
    interval = paired_bootstrap(a - b, seed=seed, resamples=resamples, level=level)
    p_value = _sign_flip(a - b, seed, resamples)
    return Difference(interval.mean, interval.low, interval.high, interval.reason, p_value)


def gap_closed(
    none: ArrayLike,
    method: ArrayLike,
    full: ArrayLike | float = 0.0,
    *,
    seed: int,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """The share of the gap between `none` and `full` that `method` closes: 1 as good as full, 0 as none.

    Values (n,) of which less is better, such as KL (full is 0) or negative log-likelihood: the share is
    ``1 - sum(method - full) / sum(none - full)``. A ratio of sums and not a mean of ratios, because a sample
    with next to no gap has a ratio that may be anything, and its noise would outweigh all others. Below 0
    where `method` is worse than `none`.

    Where `none` is no worse than `full` in total the share is nan. A resample without a gap counts as
    beyond either end, so the interval is then wider and not wrong. Raises as `paired_difference`.
    """
    none, method = _values("none", none), _values("method", method)
    base = np.full_like(none, full) if np.ndim(full) == 0 else _values("full", full)
    _check_pairs(none=none, method=method, full=base)
    gaps = np.stack([none - base, method - base], axis=1)  # (n, 2)
    gap, rest = gaps.mean(0)
    if gap <= NO_GAP:
        return Interval(nan, nan, nan, "there is no gap to close: none is no worse than full")
    means = _resampled_means(gaps, seed, resamples)
    has_gap = means[:, 0] > 0
    shares = 1 - means[:, 1] / np.where(has_gap, means[:, 0], 1)
    low, high, reason = _percentiles(
        np.where(has_gap, shares, -inf), np.where(has_gap, shares, inf), level, len(none)
    )
    if not reason and not has_gap.all():
        reason = f"{(~has_gap).mean():.1%} of the resamples have no gap"
    return Interval(float(1 - rest / gap), low, high, reason)


def _values(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} must be one number per sample and at least one, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: sample {int(np.argmin(np.isfinite(array)))} has no finite number")
    return array


def _check_pairs(**arrays: NDArray[np.float64]) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"values must belong to the same samples, got {lengths}")


def _blocks(num_samples: int, resamples: int) -> Iterator[slice]:
    """The resamples in parts of a size to draw, or to compute with, at a time."""
    size = max(1, _BLOCK // num_samples)
    for start in range(0, resamples, size):
        yield slice(start, min(start + size, resamples))


@lru_cache(maxsize=_KEPT)
def _draws(num_samples: int, seed: int, resamples: int) -> NDArray[np.unsignedinteger]:
    """(resamples, n): how often each resample, drawn with replacement, holds each sample."""
    rng = np.random.default_rng(seed)
    counts = np.empty((resamples, num_samples), dtype=np.min_scalar_type(num_samples))
    for block in _blocks(num_samples, resamples):
        drawn = rng.integers(num_samples, size=(block.stop - block.start, num_samples))
        cells = drawn + num_samples * np.arange(len(drawn))[:, None]
        counts[block] = np.bincount(cells.ravel(), minlength=drawn.size).reshape(drawn.shape)
    counts.flags.writeable = False
    return counts


@lru_cache(maxsize=_KEPT)
def _signs(num_samples: int, seed: int, resamples: int) -> NDArray[np.int8]:
    """(resamples, n): random signs, 1 and -1."""
    rng = np.random.default_rng(seed)
    signs = np.empty((resamples, num_samples), dtype=np.int8)
    for block in _blocks(num_samples, resamples):
        signs[block] = 2 * rng.integers(2, size=(block.stop - block.start, num_samples)) - 1
    signs.flags.writeable = False
    return signs


def _times(drawn: NDArray[Any], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The matrix product of what was drawn (resamples, n) and the columns (n, ...)."""
    blocks = _blocks(len(columns), len(drawn))
    return np.concatenate([drawn[block].astype(np.float64) @ columns for block in blocks])


def _resampled_means(columns: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """(resamples, columns): means over rows drawn with replacement, the same rows for every column."""
    return _times(_draws(len(columns), seed, resamples), columns) / len(columns)


def _percentiles(
    lows: NDArray[np.float64], highs: NDArray[np.float64], level: float, num_samples: int
) -> tuple[float, float, str]:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    if num_samples == 1:
        return nan, nan, "one sample has no interval"
    # Without interpolation, which between infinite values is not a number.
    low = np.quantile(lows, (1 - level) / 2, method="lower")
    high = np.quantile(highs, (1 + level) / 2, method="higher")
    return float(low), float(high), ""


def _sign_flip(differences: NDArray[np.float64], seed: int, resamples: int) -> float:
    differences = differences[differences != 0]  # their sign changes nothing
    num_samples = len(differences)
    if num_samples == 0:
        return 1.0
    # Sums that are equal but for rounding count as equal.
    threshold = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    if num_samples <= _EXACT_SAMPLES:
        patterns = (np.arange(2**num_samples)[:, None] >> np.arange(num_samples)) & 1
        return float((np.abs((2 * patterns - 1) @ differences) >= threshold).mean())
    sums = _times(_signs(num_samples, seed, resamples), differences)
    return (1 + int((np.abs(sums) >= threshold).sum())) / (resamples + 1)
