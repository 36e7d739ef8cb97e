"""Values by document in a report: means with intervals, medians, paired comparisons, and curves by distance.

Distances are small numbers of nats and are shown in thousandths.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from math import isnan
from statistics import median
from typing import TYPE_CHECKING

from kvloom.errors import EvalError
from kvloom.eval.comparison import SEED
from kvloom.eval.page import to_html, to_markdown
from kvloom.eval.plots import COLOURS, MARKERS, _figure, _inline
from kvloom.eval.statistics import Difference, Interval, paired_bootstrap, paired_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvloom.eval.page import Block

RESAMPLES = 10_000
LEVEL = 0.05
"""A difference is called one below this p-value, if its interval excludes 0 too."""


def milli(value: float) -> str:
    """A number of nats in thousandths."""
    if isnan(value):
        return "-"
    if value == 0:
        return "0"
    text = f"{1000 * value:.4g}" if abs(value) >= 1e-6 else f"{1000 * value:.1e}"
    return text.replace("-", "\N{MINUS SIGN}") if value < 0 else text


def with_interval(interval: Interval, shown: str | None = None) -> str:
    """``31.2 [28, 35.1]``, in thousandths, or `shown` before the ends; no ends where there are none."""
    text = milli(interval.mean) if shown is None else shown
    if isnan(interval.low):
        return text
    return f"{text} [{milli(interval.low)}, {milli(interval.high)}]"


def mean_text(values: Sequence[float]) -> str:
    """The mean with its bootstrap interval over documents, in thousandths."""
    return with_interval(paired_bootstrap(values, seed=SEED, resamples=RESAMPLES))


@dataclass(frozen=True)
class Paired:
    """a against b on the same documents; less is better, or smaller."""

    difference: Difference
    median: float
    num_lower: int  # documents in which a is below b
    num_documents: int
    ratio: float  # mean of a over mean of b

    @property
    def direction(self) -> int:
        """-1 where a is lower, 1 where higher, 0 where documents cannot tell.

        Both the interval and the test must say so: where one document is most of a mean, the interval alone
        is too narrow.
        """
        if not self.difference.p_value < LEVEL:
            return 0
        if self.difference.high < 0:
            return -1
        return 1 if self.difference.low > 0 else 0

    @property
    def cells(self) -> list[str]:
        """Difference, p-value, median difference, documents, ratio, for a table."""
        return [
            with_interval(self.difference),
            f"{self.difference.p_value:.3f}",
            milli(self.median),
            f"{self.num_lower} of {self.num_documents}",
            f"{self.ratio:.2f}",
        ]

    @property
    def in_words(self) -> str:
        """The numbers behind a verdict."""
        return (
            f"mean difference {with_interval(self.difference)} thousandths of a nat, "
            f"median {milli(self.median)}, p = {self.difference.p_value:.3f}, "
            f"lower in {self.num_lower} of {self.num_documents} documents"
        )


PAIRED_HEADER = ("difference x 1000 [95 %]", "p", "median difference", "lower in", "ratio of means")


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """a - b, document by document."""
    base = sum(b)
    return Paired(
        difference=paired_difference(a, b, seed=SEED, resamples=RESAMPLES),
        median=median(x - y for x, y in zip(a, b, strict=True)),
        num_lower=sum(x < y for x, y in zip(a, b, strict=True)),
        num_documents=len(a),
        ratio=sum(a) / base if base > 0 else float("nan"),
    )


def verdict(found: Paired, lower: str, higher: str) -> str:
    """`lower` or `higher`, or that the documents cannot tell."""
    if found.num_documents < 2:
        return "one document cannot tell"
    unclear = f"no difference that {found.num_documents} documents can show"
    return {-1: lower, 1: higher, 0: unclear}[found.direction]


# --- curves

Curves = dict[str, list[list[float]]]
"""By label: for each document, a value for each chunk."""


def curves(name: str, panels: Mapping[str, Curves], *, chunk: int, ylabel: str) -> str:
    """SVG of values by distance, a panel for each part: the mean over documents, its 95 % interval shaded."""
    num_columns = min(2, len(panels))
    num_lines = -(-len(panels) // num_columns)
    labels = list(dict.fromkeys(label for found in panels.values() for label in found))
    styles = dict(zip(labels, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))
    with _figure(5.2 * num_columns + 2.6, 3.3 * num_lines) as (figure, drawn):
        grid = figure.subplots(num_lines, num_columns, squeeze=False).flatten()
        for axes, (title, found) in zip(grid, panels.items(), strict=False):
            for label, values in found.items():
                _curve(axes, values, chunk, label, *styles[label])
            axes.set_title(title)
            axes.set_yscale("log")
            axes.set_xlabel("tokens after the prefix")
            axes.set_ylabel(ylabel)
            axes.grid(visible=True, lw=0.6)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles = {
            label: handle
            for axes in grid[: len(panels)]
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return _inline(name, drawn[0])


def _curve(
    axes: Axes, values: Sequence[Sequence[float]], chunk: int, label: str, colour: str, marker: str
) -> None:
    points = [paired_bootstrap(column, seed=SEED, resamples=1000) for column in zip(*values, strict=True)]
    xs = [(place + 0.5) * chunk for place in range(len(points))]
    means = [max(point.mean, _FLOOR) for point in points]
    axes.plot(xs, means, f"{marker}-", color=colour, label=label, ms=4, lw=1.3)
    if not isnan(points[0].low):
        lows = [max(point.low, _FLOOR) for point in points]
        highs = [max(point.high, _FLOOR) for point in points]
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.1, lw=0)


_FLOOR = 1e-9  # a logarithmic axis has no 0


def write_report(folder: Path, title: str, blocks: Sequence[Block]) -> Path:
    """The blocks as ``report.md`` and ``report.html`` in the folder; returns the page."""
    page = folder / "report.html"
    try:
        page.write_text(to_html(title, blocks), encoding="utf-8")
        (folder / "report.md").write_text(to_markdown(blocks, "report.html"), encoding="utf-8")
    except OSError as error:
        raise EvalError(f"cannot write the report into {str(folder)!r}: {error.strerror}") from error
    return page
