"""Plots of the report, as SVG to be put into a page.

Needs matplotlib (``pip install kvloom[plot]``), imported when the first plot is drawn. Words and axes take
the page's own colour, so that plots are readable in light and dark.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from itertools import cycle
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any

from kvloom.errors import EvalError
from kvloom.eval.comparison import STAGES
from kvloom.eval.runs import BUDGETS, families

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvloom.eval.comparison import Row
    from kvloom.eval.runs import Entry
    from kvloom.eval.statistics import Interval

INK, FAINT = "#1f2934", "#8d98a5"  # INK becomes the page's text colour
COLOURS = (
    *("#3d85c6", "#e07a3f", "#4ca64c", "#9b6bc4", "#d1495b", "#c99a1c"),
    *("#2a9d8f", "#b5659a", "#7d8a2e", "#8c6d5a", "#5d7fa3", "#e0729c"),
)
STAGE_COLOURS = dict(
    zip(STAGES, ("#7aa6cf", "#8c6d5a", "#3f6f9e", "#d8a928", "#e07a3f", "#7b8794"), strict=True)
)
_WIDEST = 18  # inches of pictures side by side
MARKERS = "osD^vP*Xhp<"  # one fewer than colours, so that pairs do not come again soon
_STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": FAINT,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "kvloom",  # the same data give the same file
    "text.parse_math": False,  # a dollar in the data is a dollar
}


def require_matplotlib() -> None:
    """Raises ``EvalError`` where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise EvalError(
            "the report's plots need matplotlib; install it with `pip install kvloom[plot]`"
        ) from None


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on, and a list that holds its SVG text afterwards."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn: list[str] = []
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the measuring font lacks, the reader's has it
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, drawn
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    drawn.append(buffer.getvalue())


def _inline(name: str, svg: str) -> str:
    """The drawing alone, its ids made its own, since many stand on one page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    own = re.sub(r"[^a-z0-9]+", "-", name.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}-", svg)
    return svg.replace(INK, "currentColor")


def quality(name: str, panels: Mapping[str, Sequence[Row]]) -> str:
    """Share of the KL gap closed against token-layers, a panel for each comparison; methods that differ in
    their budget only are joined.
    """
    num_columns = min(2, len(panels))
    num_lines = -(-len(panels) // num_columns)
    entries = list(dict.fromkeys(row.entry for rows in panels.values() for row in rows))
    groups = families(entries, *BUDGETS)
    rivals = [group for group in groups if not (group[0].is_none or group[0].is_full)]
    styles = list(zip(cycle(COLOURS), cycle(MARKERS), rivals, strict=False))
    styles += [(FAINT, "X", group) for group in groups if group not in rivals]
    with _figure(5.4 * num_columns + 2.4, 3.4 * num_lines) as (figure, drawn):
        grid = figure.subplots(num_lines, num_columns, squeeze=False).flatten()
        for axes, (title, rows) in zip(grid, panels.items(), strict=False):
            _quality_panel(axes, title, rows, styles)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles: dict[str, Any] = {}
        for axes in grid[: len(panels)]:
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8)
    return _inline(name, drawn[0])


def _quality_panel(
    axes: Axes, title: str, rows: Sequence[Row], styles: list[tuple[str, str, list[Entry]]]
) -> None:
    held = {row.entry: row for row in rows if row.gap is not None and not isnan(row.gap.mean)}
    has_share = all(row.token_layers_share is not None for row in held.values())
    for place, (colour, marker, group) in enumerate(styles):
        points = sorted(
            ((_x(held[entry]), held[entry].gap) for entry in group if entry in held),
            key=lambda point: point[0],
        )
        if points:
            _points(axes, points, colour, marker, _family_name(group), -place)
    _cut(axes)
    axes.axhline(0, color=FAINT, lw=0.8)
    axes.axhline(1, color=FAINT, lw=0.8, ls="--")
    axes.set_title(title)
    axes.set_xlabel("token-layers, share of full prefill's" if has_share else "token-layers, thousands")
    axes.set_ylabel("KL gap closed")
    axes.yaxis.set_major_formatter(_as_percent)
    if has_share:
        axes.xaxis.set_major_formatter(_as_percent)
    axes.grid(visible=True, lw=0.6)


def _x(row: Row) -> float:
    return row.token_layers / 1000 if row.token_layers_share is None else row.token_layers_share


def _points(
    axes: Axes, points: Sequence[tuple[float, Any]], colour: str, marker: str, label: str, order: int
) -> None:
    xs, gaps = [point[0] for point in points], [point[1] for point in points]
    axes.errorbar(
        xs,
        [gap.mean for gap in gaps],
        yerr=_errors(gaps),
        fmt=f"{marker}-",
        color=colour,
        label=label,
        ms=5.5,
        lw=1.3,
        elinewidth=1,
        capsize=2.5,
        zorder=10 + 0.01 * order,
    )


def _errors(intervals: Sequence[Interval]) -> list[list[float]]:
    """Lengths of the bars below and above; 0 where there is no finite end."""
    below = [i.mean - i.low if isfinite(i.low) else 0.0 for i in intervals]
    above = [i.high - i.mean if isfinite(i.high) else 0.0 for i in intervals]
    return [below, above]


def _cut(axes: Axes) -> None:
    """Ends the axis of shares at -1: below, one long interval would press all others flat."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -1.0), max(high, 0.05))


def _as_percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.0f} %".replace("-", "\N{MINUS SIGN}")


def _family_name(group: Sequence[Entry]) -> str:
    """The words of the titles that all members share."""
    shared = [word for word in group[0].title.split() if all(word in e.title.split() for e in group)]
    return " ".join(shared)


def ttft(name: str, rows: Sequence[Row]) -> str:
    """Stages of the time to first token, stacked, one bar for each method; medians over samples."""
    with _figure(9.5, 1.3 + 0.32 * len(rows)) as (figure, drawn):
        axes = figure.subplots()
        lefts = [0.0] * len(rows)
        for stage in STAGES:
            widths = [row.stages_ms[stage] for row in rows]
            if any(widths):
                axes.barh(
                    range(len(rows)),
                    widths,
                    left=lefts,
                    height=0.62,
                    color=STAGE_COLOURS[stage],
                    label=stage.replace("_", " "),
                )
                lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [row.entry.title for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms to first token")
        axes.grid(visible=True, axis="x", lw=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=len(STAGES), frameon=False, fontsize=8)
    return _inline(name, drawn[0])


def kinds(name: str, by_kind: Mapping[str, Sequence[Row]]) -> str:
    """Share of the KL gap closed, with its interval, a group of bars for each kind of sample; anchors are
    left out, and something must remain.
    """
    every = dict.fromkeys(row.entry for rows in by_kind.values() for row in rows)
    entries = [entry for entry in every if not (entry.is_none or entry.is_full)]
    width = 0.82 / len(entries)
    with _figure(max(6.0, 1.5 + 0.17 * len(by_kind) * (len(entries) + 1.5)) + 2, 3.6) as (figure, drawn):
        axes = figure.subplots()
        for place, (colour, entry) in enumerate(zip(cycle(COLOURS), entries, strict=False)):
            gaps = [
                (number, row.gap)
                for number, rows in enumerate(by_kind.values())
                for row in rows
                if row.entry == entry and row.gap is not None and not isnan(row.gap.mean)
            ]
            axes.bar(
                [number - 0.41 + (place + 0.5) * width for number, _ in gaps],
                [gap.mean for _, gap in gaps],
                width=0.92 * width,
                color=colour,
                hatch="" if place < len(COLOURS) else "////",
                yerr=_errors([gap for _, gap in gaps]) if gaps else None,
                error_kw={"ecolor": INK, "elinewidth": 0.8},
                label=entry.title,
            )
        names = [f"{kind}\nN = {rows[0].num_samples}" for kind, rows in by_kind.items()]
        axes.set_xticks(range(len(names)), names)
        _cut(axes)
        axes.axhline(0, color=FAINT, lw=0.8)
        axes.set_ylabel("KL gap closed")
        axes.yaxis.set_major_formatter(_as_percent)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return _inline(name, drawn[0])


def heatmaps(
    name: str,
    cells: Mapping[str, Mapping[tuple[int, int], float]],
    measure: str,
    *,
    top: float,
    more_is_better: bool,
    across: str = "length",
) -> str:
    """A heatmap for each method, by (length, depth) or what else is `across`, all on one scale from 0 to
    `top`.
    """
    lengths = sorted({length for by_cell in cells.values() for length, _ in by_cell})
    depths = sorted({depth for by_cell in cells.values() for _, depth in by_cell})
    width = 1.1 + 0.52 * len(lengths)
    num_columns = max(1, min(4, len(cells), int(_WIDEST / width)))
    num_lines = -(-len(cells) // num_columns)
    size = width * num_columns + 1.2, (1.1 + 0.36 * len(depths)) * num_lines + 0.2
    with _figure(max(size[0], 3.2 * num_columns), size[1]) as (figure, drawn):
        grid = figure.subplots(num_lines, num_columns, squeeze=False).flatten()
        mesh = None
        for axes, (title, by_cell) in zip(grid, cells.items(), strict=False):
            values = [[by_cell.get((length, depth), float("nan")) for length in lengths] for depth in depths]
            scheme = "viridis" if more_is_better else "viridis_r"
            mesh = axes.pcolormesh(values, cmap=scheme, vmin=0, vmax=top or 1, edgecolors="none")
            _number(axes, values, (top or 1), more_is_better)
            axes.set_xticks([0.5 + place for place in range(len(lengths))], [f"{n:,}" for n in lengths])
            axes.set_yticks([0.5 + place for place in range(len(depths))], [f"{depth} %" for depth in depths])
            axes.invert_yaxis()
            axes.set_title(title, fontsize=8.5, wrap=True)
            axes.set_xlabel(across)
            axes.set_ylabel("depth")
        for axes in grid[len(cells) :]:
            axes.set_axis_off()
        figure.colorbar(mesh, ax=list(grid), label=measure, shrink=0.8)  # type: ignore[arg-type]
    return _inline(name, drawn[0])


def _number(axes: Axes, values: list[list[float]], top: float, more_is_better: bool) -> None:
    """Writes each value into its cell, dark on the light end of the scale."""
    for line, cells in enumerate(values):
        for place, value in enumerate(cells):
            if not isnan(value):
                is_light = (value > 0.55 * top) == more_is_better
                colour = "#101418" if is_light else "#f8f9fa"
                axes.text(
                    place + 0.5, line + 0.5, f"{value:.2f}", ha="center", va="center", color=colour, size=8
                )


def layers(name: str, groups: Mapping[str, Sequence[tuple[str, Row]]]) -> str:
    """Share of the KL gap closed by scoring layers, a line for each group of methods that differ in nothing
    else.
    """
    names = list(dict.fromkeys(layer for points in groups.values() for layer, _ in points))
    with _figure(max(6.5, 1.8 + 0.5 * len(names)), 3.2 + 0.2 * len(groups)) as (figure, drawn):
        axes = figure.subplots()
        for place, (colour, marker, (label, points)) in enumerate(
            zip(cycle(COLOURS), cycle(MARKERS), groups.items(), strict=False)
        ):
            held = [
                (float(names.index(layer)), row.gap)
                for layer, row in points
                if row.gap is not None and not isnan(row.gap.mean)
            ]
            if held:
                _points(axes, held, colour, marker, label, -place)
        axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 8 else 0)
        axes.set_xlabel("layers whose attention is the score")
        axes.set_ylabel("KL gap closed")
        axes.yaxis.set_major_formatter(_as_percent)
        axes.grid(visible=True, lw=0.6)
        figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    return _inline(name, drawn[0])
