"""Intervals, tests and shares on cases worked out by hand, and the coverage of the intervals by
simulation.
"""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvloom.eval import statistics
from kvloom.eval.statistics import gap_closed, paired_bootstrap, paired_difference

if TYPE_CHECKING:
    from numpy.typing import NDArray


def test_bootstrap_of_two_values_by_hand() -> None:
    """Of 0 and 1 the mean is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4: the ends lie at 0 and 1 above a level of
    1/2, at 1/2 below.
    """
    wide = paired_bootstrap([0, 1], seed=0, level=0.6)
    assert (wide.mean, wide.low, wide.high, wide.reason) == (0.5, 0, 1, "")
    narrow = paired_bootstrap([0, 1], seed=0, level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_bootstrap_width_is_the_standard_error() -> None:
    values = np.random.default_rng(1).normal(3, 2, 400)
    interval = paired_bootstrap(values, seed=0)
    half = 1.96 * values.std() / 20
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)


def test_bootstrap_coverage() -> None:
    rng, num_hits = np.random.default_rng(2), 0
    for trial in range(400):
        interval = paired_bootstrap(rng.exponential(1, 40), seed=trial, resamples=500, level=0.8)
        num_hits += interval.low <= 1 <= interval.high
    assert 0.72 < num_hits / 400 < 0.84  # 0.8, a little less on skewed values


def test_the_seed_decides() -> None:
    values = np.arange(30.0)
    assert paired_bootstrap(values, seed=1) == paired_bootstrap(values, seed=1)
    assert paired_bootstrap(values, seed=1) != paired_bootstrap(values, seed=2)
    # 10,000 resamples of 300 do not fit one block of draws
    many = np.arange(300.0)
    assert paired_bootstrap(many, seed=1) == paired_bootstrap(many, seed=1)


def slow_bootstrap(values: NDArray[np.float64], seed: int, resamples: int) -> tuple[float, float]:
    """Every resample drawn and averaged as a list of samples."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(resamples, len(values)))].mean(1)
    return (
        float(np.quantile(means, 0.025, method="lower")),
        float(np.quantile(means, 0.975, method="higher")),
    )


@pytest.mark.parametrize("num_samples", [2, 40, 255, 256, 700])
def test_counting_draws_is_drawing_samples(num_samples: int) -> None:
    values = np.random.default_rng(6).exponential(1, num_samples)
    interval = paired_bootstrap(values, seed=7, resamples=1000)
    assert (interval.low, interval.high) == pytest.approx(slow_bootstrap(values, 7, 1000), rel=1e-12)


def test_what_was_drawn_is_kept_and_never_for_other_numbers() -> None:
    values = np.arange(50.0)
    first = paired_difference(values, 0 * values, seed=11, resamples=500)
    drawn = [statistics._draws.cache_info().misses, statistics._signs.cache_info().misses]
    gap_closed(values, values / 2, seed=11, resamples=500)
    again = paired_difference(values, 0 * values, seed=11, resamples=500)
    assert again == first
    assert drawn == [statistics._draws.cache_info().misses, statistics._signs.cache_info().misses]
    for change in ({"seed": 12, "resamples": 500}, {"seed": 11, "resamples": 501}):
        assert paired_difference(values, 0 * values, **change) != first
    assert statistics._draws.cache_info().misses == drawn[0] + 2


def test_one_sample_has_no_interval() -> None:
    interval = paired_bootstrap([2.5], seed=0)
    assert interval.mean == 2.5
    assert isnan(interval.low)
    assert isnan(interval.high)
    assert interval.reason == "one sample has no interval"
    difference = paired_difference([2], [1], seed=0)
    assert (difference.mean, difference.p_value, difference.reason) == (1, 1, interval.reason)
    share = gap_closed([2], [0.5], seed=0)
    assert (share.mean, share.reason) == (0.75, interval.reason)


@pytest.mark.parametrize(
    ("differences", "p_value"),
    [
        ([1, 1, 1, 1, 1], 2 / 32),  # all plus or all minus
        ([3, 1, -1], 6 / 8),  # |sum| >= 3: +3+1-1, +3-1+1, +3+1+1 and their mirrors
        ([1, -1], 1),
        ([0, 0, 0], 1),
        ([0, 2, 0, 2, 2], 2 / 8),  # samples that do not differ drop out
        ([0.1, 0.2, -0.3], 1),  # the sum is 0 but for rounding
    ],
)
def test_sign_flip_by_hand(differences: list[float], p_value: float) -> None:
    zeros = [0.0] * len(differences)
    result = paired_difference(differences, zeros, seed=0)
    assert result.p_value == pytest.approx(p_value, abs=1e-12)
    assert result.mean == pytest.approx(np.mean(differences))
    mirrored = paired_difference(zeros, differences, seed=0)
    assert mirrored.p_value == pytest.approx(p_value, abs=1e-12)
    assert mirrored.mean == pytest.approx(-np.mean(differences))


def test_sign_flip_equal_sums_count_as_equal() -> None:
    """0.3 + 0.1 - 0.1 is rounded above 0.3 and 0.3 - 0.1 + 0.1 is not; both count, as with 3, 1 and -1."""
    assert paired_difference([0.3, 0.1, -0.1], [0, 0, 0], seed=0).p_value == 6 / 8


def test_sign_flip_drawn_agrees_with_exact() -> None:
    """The binomial test: 12 of 16 equal differences are positive, p = P(at least 12 or at most 4)."""
    differences = np.array([1.0] * 12 + [-1.0] * 4)
    p_value = paired_difference(differences, np.zeros(16), seed=0).p_value
    assert p_value == pytest.approx(2 * (1820 + 560 + 120 + 16 + 1) / 2**16, abs=0.01)
    certain = paired_difference(np.ones(40), np.zeros(40), seed=0, resamples=999).p_value
    assert certain == 1 / 1000  # never 0


def test_p_values_are_level_where_nothing_differs() -> None:
    rng = np.random.default_rng(3)
    p_values = [
        paired_difference(rng.normal(size=30), rng.normal(size=30), seed=trial, resamples=200).p_value
        for trial in range(400)
    ]
    assert 0.02 < np.mean(np.array(p_values) <= 0.05) < 0.08
    assert 0.43 < np.mean(p_values) < 0.57


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(4)
    hard = rng.normal(0, 10, 50)  # what makes a sample hard for both
    paired = paired_difference(hard + 1 + rng.normal(0, 0.1, 50), hard, seed=0)
    assert 0.9 < paired.low < paired.mean < paired.high < 1.1
    assert paired.p_value < 0.001


def test_gap_closed_is_a_ratio_of_sums() -> None:
    """Sums 4 and 1 make 3/4; the mean of the ratios 1 - 1/3 and 1 - 0/1 would be 5/6."""
    assert gap_closed([3, 1], [1, 0], seed=0).mean == 0.75
    assert gap_closed([3, 1], [3, 1], seed=0).mean == 0
    assert gap_closed([3, 1], [0, 0], seed=0).mean == 1
    assert gap_closed([3, 1], [6, 2], seed=0).mean == -1
    assert gap_closed([3, 1], [2, 2], [1, 1], seed=0).mean == 0
    assert gap_closed([5, 5], [3, 2], 1, seed=0).mean == 1 - 3 / 8


def test_gap_closed_interval_by_hand() -> None:
    """Both samples, or one of them twice: shares 3/4, 2/3 and 1 with chances 1/2, 1/4, 1/4."""
    share = gap_closed([3, 1], [1, 0], seed=0, level=0.6)
    assert (share.low, share.high) == (pytest.approx(2 / 3), 1)
    same = gap_closed([1, 2, 4, 8], [0.5, 1, 2, 4], seed=0)  # drawn as a whole, the ratio never moves
    assert (same.low, same.high) == (0.5, 0.5)


def test_gap_closed_coverage() -> None:
    rng, num_hits = np.random.default_rng(5), 0
    for trial in range(300):
        none = rng.exponential(1, 50)
        share = gap_closed(none, none * rng.uniform(0, 0.8, 50), seed=trial, resamples=400, level=0.8)
        num_hits += share.low <= 0.6 <= share.high
    assert 0.72 < num_hits / 300 < 0.86


def test_no_gap_is_said_and_does_not_crash() -> None:
    for none, full in (([0, 0], 0.0), ([1, 2], 2.0)):
        share = gap_closed(none, [0, 1], full, seed=0)
        assert isnan(share.mean)
        assert isnan(share.low)
        assert isnan(share.high)
        assert share.reason == "there is no gap to close: none is no worse than full"


def test_resamples_without_a_gap_widen_the_interval() -> None:
    """One sample of three has the gap: (2/3)^3 of the resamples have none, more than either tail."""
    share = gap_closed([4, 0, 0], [1, 0, 0], seed=0)
    assert (share.mean, share.low, share.high) == (0.75, -np.inf, np.inf)
    percent = float(share.reason.split("%")[0])
    assert percent == pytest.approx(100 * 8 / 27, abs=1.5)
    assert share.reason.endswith("of the resamples have no gap")


@pytest.mark.parametrize("measure", [paired_difference, gap_closed])
def test_pairs_must_match(measure: object) -> None:
    with pytest.raises(ValueError, match="belong to the same samples"):
        measure([1, 2], [1], seed=0)  # type: ignore[operator]


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="values: sample 1 has no finite number"):
        paired_bootstrap([1, np.nan], seed=0)
    with pytest.raises(ValueError, match="method: sample 0 has no finite number"):
        gap_closed([1, 2], [np.inf, 1], seed=0)
    with pytest.raises(ValueError, match=r"at least one, got shape \(0,\)"):
        paired_bootstrap([], seed=0)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        paired_bootstrap([1, 2], seed=0, level=95)
