"""Tables of the report: numbers into words, rows into grids."""

from __future__ import annotations

from math import isinf, isnan
from typing import TYPE_CHECKING

from kvloom.eval.comparison import STAGES, Comparison, Row, difference
from kvloom.eval.page import Grid
from kvloom.eval.runs import as_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvloom.eval.runs import Entry
    from kvloom.eval.statistics import Interval

_MINUS = "\N{MINUS SIGN}"
ANSWERS = {"F1": "f1", "EM": "exact_match", "contains": "contains"}
"""Columns on the text of greedy answers, and what they show of a row."""


def percent(share: float | None) -> str:
    """``0.153`` as ``15 %``; nothing for None."""
    return "" if share is None else f"{whole(share)} %"


def whole(share: float) -> str:
    """``0.153`` as ``15``, in per cent."""
    if isinf(share):
        return "∞" if share > 0 else f"{_MINUS}∞"
    return f"{round(100 * share) + 0:d}".replace("-", _MINUS)


def gap(interval: Interval | None, entry: Entry) -> str:
    """A share of the gap with its interval; an anchor has none, since it is 0 or all of it by definition."""
    if interval is None:
        return ""
    if isnan(interval.mean):
        return "no gap"
    return percent(interval.mean) if entry.is_none or entry.is_full else with_ends(interval)


def with_ends(share: Interval) -> str:
    """``61 % [58, 64]``; without the ends where there are none, and nothing for what is no number."""
    if isnan(share.mean):
        return ""
    ends = "" if isnan(share.low) else f" [{whole(share.low)}, {whole(share.high)}]"
    return percent(share.mean) + ends


def nats(value: float) -> str:
    """A KL or NLL with three decimals, or in powers of ten where those would be 0."""
    text = "0" if value == 0 else f"{value:.3f}" if abs(value) >= 0.0005 else f"{value:.0e}"
    return text.replace("-", _MINUS)


def milliseconds(value: float) -> str:
    """Whole ones, below 10 with a decimal."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def main_grid(groups: Mapping[str, Sequence[Row]], lead: str | None = None) -> Grid:
    """The main table: quality, and cost beside it. With `lead`, a first column of that name says which group
    a row belongs to.
    """
    every = [row for rows in groups.values() for row in rows]
    stages = [stage for stage in STAGES if any(row.stages_ms[stage] for row in every)]
    parts = " / ".join(stage.replace("_", " ") for stage in stages)
    answers = [
        column for column, name in ANSWERS.items() if any(getattr(row, name) is not None for row in every)
    ]
    header = [
        *([lead] if lead else []),
        *("method", "options", "N", "KL gap closed", "same, first token", "KL", "NLL", "agreement"),
        *answers,
        *("rows", "token-layers", "of full's", "TTFT / full's", f"TTFT ms ({parts})", "KV MB"),
    ]
    lines = [
        [*([title] if lead else []), *_main_line(row, stages, answers)]
        for title, rows in groups.items()
        for row in rows
    ]
    return Grid(header, lines, num_text=3 if lead else 2)


def _main_line(row: Row, stages: Sequence[str], answers: Sequence[str]) -> list[str]:
    parts = " / ".join(milliseconds(row.stages_ms[stage]) for stage in stages)
    measured = [getattr(row, ANSWERS[column]) for column in answers]
    return [
        row.entry.name,
        row.entry.shown,
        str(row.num_samples),
        gap(row.gap, row.entry),
        gap(row.first_gap, row.entry),
        nats(row.kl),
        nats(row.nll),
        f"{row.agreement:.3f}",
        *("" if value is None else f"{value:.3f}" for value in measured),
        f"{row.rows:,.0f} ({percent(row.rows_share)})",
        f"{row.token_layers:,.0f}",
        percent(row.token_layers_share),
        "" if row.ttft_ratio is None else f"{row.ttft_ratio:.2f}",
        f"{milliseconds(row.ttft_ms)} ({parts})",
        f"{row.kv_mb:,.1f}",
    ]


def paired_grid(comparisons: Mapping[str, Comparison], baseline: Entry) -> Grid:
    """Every method against the baseline: the difference in KL, below 0 where the method is better."""
    lines = [
        [
            title,
            entry.name,
            entry.shown,
            str(comparison.num_samples),
            *_difference(comparison, entry, baseline, "kl"),
            *_difference(comparison, entry, baseline, "first_kl"),
        ]
        for title, comparison in comparisons.items()
        if comparison.num_samples and baseline in comparison.columns
        for entry in comparison.columns
        if entry != baseline
    ]
    header = ["set", "method", "options", "N", "KL difference", "p", "same, first token", "p"]
    return Grid(header, lines, num_text=3)


def _difference(comparison: Comparison, entry: Entry, baseline: Entry, name: str) -> tuple[str, str]:
    found = difference(comparison, entry, baseline, name)
    ends = "" if isnan(found.low) else f" [{_signed(found.low)}, {_signed(found.high)}]"
    return f"{_signed(found.mean)}{ends}", f"{found.p_value:.4f}"


def _signed(value: float) -> str:
    text = nats(value)
    return f"+{text}" if value > 0 else text


def geometry_grid(family: Sequence[Entry], groups: Mapping[str, Sequence[Row]]) -> Grid:
    """The paper's Table 1: scoring positions down, sets across, share of the gap closed and, where answers
    were generated, F1.
    """
    found = {(title, row.entry): row for title, rows in groups.items() for row in rows if row.entry in family}
    titles = [title for title in groups if any((title, entry) in found for entry in family)]
    with_f1 = [
        title for title in titles if all(found[key].f1 is not None for key in found if key[0] == title)
    ]
    lines = []
    for entry in family:
        held = [found.get((title, entry)) for title in titles]
        scores = [found.get((title, entry)) for title in with_f1]
        lines.append(
            [
                as_text(entry.options["geometry"]),
                *("" if row is None else gap(row.gap, row.entry) for row in held),
                *("" if row is None or row.f1 is None else f"{row.f1:.3f}" for row in scores),
            ]
        )
    return Grid(["geometry", *titles, *(f"F1, {title}" for title in with_f1)], lines)
