"""Draws docs/pictures/overview.svg: the straight line, and the demo's time to first token.

Usage: kvloom demo --json > docs/results/demo.json && python docs/pictures/draw.py
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent
INK, FAINT, REUSED, EXACT, FRESH = "#1f2933", "#9aa5b1", "#c9d6e3", "#9fb8d1", "#e07a3f"
STAGES = {
    "load": "#9fb8d1",
    "splice": "#5b87b3",
    "score": "#f2c14e",
    "recompute": "#e07a3f",
    "first_token": "#7b8794",
}


def box(axes: Axes, x: float, y: float, width: float, text: str, note: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, 0.85, boxstyle="round,pad=0.03", facecolor="white", edgecolor=INK, lw=1.1
        )
    )
    axes.text(x + width / 2, y + 0.54, text, ha="center", va="center", fontsize=10, weight="bold", color=INK)
    axes.text(x + width / 2, y + 0.22, note, ha="center", va="center", fontsize=7.2, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.1})


def cells(axes: Axes, x: float, y: float, colours: list[str]) -> float:
    for colour in colours:
        axes.add_patch(Rectangle((x, y), 0.105, 0.32, facecolor=colour, edgecolor="white", lw=0.6))
        x += 0.105
    return x


def draw_line(axes: Axes) -> None:
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 4.3)
    axes.axis("off")
    axes.text(0.05, 4.05, "once per document", fontsize=8.5, color=FAINT)
    box(axes, 0.1, 2.95, 2.3, "prefill", "each chunk behind the header")
    box(axes, 3.0, 2.95, 2.3, "store", "one checked file per chunk")
    arrow(axes, (2.45, 3.37), (2.97, 3.37))
    axes.text(0.05, 2.42, "per question", fontsize=8.5, color=FAINT)
    steps = [
        ("splice", "keys turned to their new places"),
        ("select", "rows that the question looks at"),
        ("recompute", "rows and question, one pass"),
        ("answer", "streamed, with its trace"),
    ]
    for number, (name, note) in enumerate(steps):
        box(axes, 0.1 + 2.95 * number, 1.3, 2.4, name, note)
        if number:
            arrow(axes, (2.95 * number - 0.42, 1.72), (2.95 * number + 0.07, 1.72))
    arrow(axes, (4.15, 2.92), (1.3, 2.18))
    fresh = {17, 21, 22, 29, 36, 37, 44}
    x = cells(axes, 0.1, 0.55, [EXACT] * 5)
    for first, last in ((5, 16), (16, 27), (27, 34), (34, 48)):
        kind = EXACT if first == 5 else REUSED
        x = cells(axes, x + 0.06, 0.55, [FRESH if place in fresh else kind for place in range(first, last)])
    cells(axes, x + 0.06, 0.55, [FRESH] * 6)
    legend = ((0.1, EXACT, "exact already: header, first chunk"), (4.0, REUSED, "reused as stored"))
    for x, colour, text in (*legend, (6.6, FRESH, "computed now: chosen rows, question")):
        axes.add_patch(Rectangle((x, 0.1), 0.18, 0.2, facecolor=colour))
        axes.text(x + 0.28, 0.2, text, fontsize=8, va="center", color=INK)


def draw_bars(axes: Axes, report: dict) -> None:
    labels = [row["label"] for row in report["summary"]]
    for place, label in enumerate(labels):
        runs = [next(run for run in asked["runs"] if run["label"] == label) for asked in report["questions"]]
        left = 0.0
        for stage, colour in STAGES.items():
            taken = statistics.median(run["seconds"][stage] for run in runs)
            axes.barh(-place, taken, left=left, color=colour, height=0.55)
            left += taken
        kl = report["summary"][place]["mean_kl"]
        axes.text(left + 0.06, -place, f"{left:.2f} s, KL {kl:.3f}", va="center", fontsize=8.5, color=INK)
    axes.set_yticks([-place for place in range(len(labels))], labels, fontsize=9)
    axes.set_xlabel("seconds to first token, median over the questions", fontsize=8.5)
    axes.set_xlim(0, 1.35 * max(row["median_ttft_s"] for row in report["summary"]))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in STAGES.values()]
    names = [stage.replace("_", " ") for stage in STAGES]
    axes.legend(handles, names, ncols=1, fontsize=7.5, frameon=False, loc="lower right")
    questions = report["summary"][0]["num_questions"]
    axes.set_title(
        f"kvloom demo: {report['model']}, {report['mean_context_tokens']:,.0f} context tokens, "
        f"{questions} questions, 2 CPU cores",
        fontsize=9,
        color=INK,
        loc="left",
    )


def main() -> None:
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvloom"
    report = json.loads((DOCS / "results" / "demo.json").read_text(encoding="utf-8"))
    figure, (line, bars) = plt.subplots(2, 1, figsize=(9.6, 5.9), height_ratios=[1.75, 1])
    draw_line(line)
    draw_bars(bars, report)
    figure.tight_layout()
    figure.savefig(DOCS / "pictures" / "overview.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
