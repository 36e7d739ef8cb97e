"""The picture of a bench of the time to first token, in the style of the report's plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvloom.bench.ttft import PARTS
from kvloom.eval.plots import INK, STAGE_COLOURS, _figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

COLOURS: dict[str, str] = {**STAGE_COLOURS, "rest": "#7b8794"}


def write_plot(folder: Path, found: Mapping[str, Any]) -> Path:
    """Writes DIR/ttft.svg, a panel for each length: parts stacked, whiskers from the least to the most, a
    mark at the bound; and returns its path.
    """
    lengths = list(dict.fromkeys(line["length"] for line in found["results"]))
    panels = [[line for line in found["results"] if line["length"] == length] for length in lengths]
    height = sum(0.8 + 0.26 * len(lines) for lines in panels) + 0.6
    with _figure(9.5, height) as (figure, drawn):
        figure.set_facecolor("white")  # a file of its own, read on any background
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [len(lines) + 2 for lines in panels]}
        ).flatten()
        for axes, length, lines in zip(grid, lengths, panels, strict=True):
            _panel(axes, lines)
            axes.set_title(f"{found['model']}, {length:,} tokens")
        grid[-1].set_xlabel("seconds to first token; the black mark is the bound")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    path = folder / "ttft.svg"
    path.write_text(drawn[0], encoding="utf-8")
    return path


def _panel(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    lefts = [0.0] * len(lines)
    for part in (*PARTS, "rest"):
        widths = [max(0.0, line["parts"].get(part, {"seconds": 0.0})["seconds"]) for line in lines]
        colour = COLOURS[part]
        axes.barh(range(len(lines)), widths, left=lefts, height=0.62, color=colour, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, line in enumerate(lines):
        times = line["ttft_s"]
        axes.hlines(place, times["low"], times["high"], color=INK, lw=0.9)
        axes.vlines(line["bound_s"], place - 0.38, place + 0.38, color=INK, lw=2)
    axes.set_yticks(range(len(lines)), [label(line) for line in lines])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", lw=0.6)
    axes.set_axisbelow(True)


def label(line: Mapping[str, Any]) -> str:
    """A line's method in short: ``infoflow 15 %, disk``."""
    return f"{line['method']}{share_of(line)}{', disk' if line['chunks'] == 'disk' else ''}"


def share_of(line: Mapping[str, Any]) -> str:
    """Blank and share of a line's method, such as `` 15 %``, or nothing."""
    return "" if line["ratio"] is None else f" {100 * line['ratio']:.4g} %"
