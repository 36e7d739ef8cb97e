"""Recomputed: where the rows that methods chose lie, after the InfoFlow KV paper's Table 2, and how many rows
two methods share.

Rows are of the context as read. Results without them, of methods that recompute none or of older versions,
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from kvloom.errors import EvalError
from kvloom.eval.page import Grid, Heading, Paragraph
from kvloom.eval.tables import percent
from kvloom.trace import from_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvloom.eval.comparison import Comparison
    from kvloom.eval.page import Block
    from kvloom.eval.runner import Result
    from kvloom.eval.runs import Entry

    Rows = NDArray[np.int64]

NUM_PARTS = 5
_WHERE = (
    "Rows are counted in the context as read, and those that are exact already (header and first chunk) are "
    "never chosen. Fifths: share of the rows in each fifth of the context. Position: mean, 0 the first row "
    "and 1 the last. Distance: tokens from the sample's median row to the end of the context. All are means "
    "over samples. RoPE similarity: the mean cosine between the rotations at a row's position and at a "
    "question token's, over rotary pairs, question tokens and rows: the similarity of a query and a key that "
    "are alike but for their positions, 1 at distance 0; that of full is the whole context's."
)
_OVERLAP = (
    "Of the rows that the method of a line recomputes, the share that the method of a column recomputes too, "
    "mean over samples. Methods with the same ratio and in the order given only. By chance: rows "
    "over the rows to choose from, which are those from the first one on that any of these methods chose."
)


@dataclass(frozen=True)
class Whereabouts:
    """Where one method's rows lie: means over the samples in which it has any."""

    num_samples: int
    parts: list[float]  # share of the rows in each fifth of the context
    position: float  # 0 the first row, 1 the last
    distance: float  # tokens from the median row to the end of the context
    similarity: float | None  # None where a result does not say


def rows_of(result: Result) -> Rows | None:
    """The rows recomputed, ascending; None where none are recorded. Raises ``EvalError`` for what are none of
    the context's.
    """
    text = result.trace.get("rows")
    if not text:
        return None
    rows, num_rows = _parsed(str(text)), result.trace["context_tokens"]
    if not 0 <= rows[0] <= rows[-1] < num_rows:
        raise EvalError(
            f"the result of {result.method} on {result.benchmark} {result.sample} names rows "
            f"{str(text)[:40]}, which are no ranges, such as 3-5,9, of {num_rows} context rows; run it anew"
        )
    return rows


@lru_cache(maxsize=10_000)
def _parsed(text: str) -> Rows:
    """The rows; -1 where the text is no ranges. A report reads each several times."""
    try:
        rows = np.array(from_ranges(text), dtype=np.int64)
    except ValueError:
        rows = np.array([-1])
    rows.flags.writeable = False
    return rows


def whereabouts(results: Iterable[Result]) -> Whereabouts | None:
    """None where no result has rows."""
    held = [(result, rows) for result in results if (rows := rows_of(result)) is not None]
    if not held:
        return None
    sizes = [result.trace["context_tokens"] for result, _ in held]
    parts = [
        np.bincount(NUM_PARTS * rows // size, minlength=NUM_PARTS) / len(rows)
        for (_, rows), size in zip(held, sizes, strict=True)
    ]
    placed = list(zip((rows for _, rows in held), sizes, strict=True))
    similarities = [result.rope_similarity for result, _ in held if result.rope_similarity is not None]
    return Whereabouts(
        num_samples=len(held),
        parts=[float(share) for share in np.mean(parts, axis=0)],
        position=fmean(float(rows.mean()) / max(size - 1, 1) for rows, size in placed),
        distance=fmean(size - float(np.median(rows)) for rows, size in placed),
        similarity=fmean(similarities) if len(similarities) == len(held) else None,
    )


def where(comparisons: Mapping[str, Comparison]) -> Iterator[Block]:
    """The section on where rows lie; nothing where no method but full prefill has any."""
    lines, has_choice = [], False
    for title, comparison in comparisons.items():
        for entry, column in comparison.columns.items():
            found = whereabouts(measured.result for measured in column)
            if found is None:
                continue
            has_choice = has_choice or not entry.is_full
            similarity = "" if found.similarity is None else f"{found.similarity:.3f}"
            lines.append(
                [title, entry.name, entry.shown, str(found.num_samples)]
                + [percent(share) for share in found.parts]
                + [f"{found.position:.2f}", f"{found.distance:,.0f}", similarity]
            )
    if has_choice:
        yield Heading(3, "Where the recomputed rows lie")
        yield Paragraph(_WHERE)
        fifths = ["1st fifth", "2nd", "3rd", "4th", "5th"]
        header = ["set", "method", "options", "N", *fifths, "position", "distance", "RoPE similarity"]
        yield Grid(header, lines, num_text=3)


@dataclass(frozen=True)
class Overlap:
    """How many rows methods of one budget share."""

    entries: list[Entry]
    shares: dict[tuple[Entry, Entry], list[float]]  # of the first one's rows, by sample
    chance: dict[Entry, list[float]]  # share that so many random rows would hit, by sample

    @property
    def mean_chance(self) -> float:
        return fmean(value for values in self.chance.values() for value in values)


def overlap(comparison: Comparison, entries: list[Entry]) -> Overlap | None:
    """The overlap of the entries on the samples in which all of them have rows; None where there is no such
    sample.
    """
    by_entry = {entry: [rows_of(m.result) for m in comparison.columns[entry]] for entry in entries}
    shares: dict[tuple[Entry, Entry], list[float]] = {(a, b): [] for a in entries for b in entries}
    chance: dict[Entry, list[float]] = {entry: [] for entry in entries}
    for place in range(comparison.num_samples):
        rows = {entry: found for entry in entries if (found := by_entry[entry][place]) is not None}
        if len(rows) < len(entries):
            continue
        num_rows = comparison.columns[entries[0]][place].result.trace["context_tokens"]
        num_candidates = num_rows - min(int(found[0]) for found in rows.values())
        is_chosen = np.zeros((len(entries), num_rows))
        for line, found in zip(is_chosen, rows.values(), strict=True):
            line[found] = 1
        common = is_chosen @ is_chosen.T  # (entries, entries)
        for line, a in enumerate(entries):
            chance[a].append(len(rows[a]) / num_candidates)
            for across, b in enumerate(entries):
                shares[a, b].append(float(common[line, across]) / len(rows[a]))
    return Overlap(entries, shares, chance) if chance[entries[0]] else None


def overlaps(comparisons: Mapping[str, Comparison]) -> Iterator[Block]:
    """The section on shared rows: a matrix for each set and ratio that two methods or more have."""
    grids = [found for title, comparison in comparisons.items() for found in _matrices(title, comparison)]
    if grids:
        yield Heading(3, "Overlap of the recomputed sets")
        yield Paragraph(_OVERLAP)
        for caption, grid in grids:
            yield Paragraph(caption)
            yield grid


def _matrices(title: str, comparison: Comparison) -> Iterator[tuple[str, Grid]]:
    groups: dict[float, list[Entry]] = {}
    for entry, column in comparison.columns.items():
        has_ratio = "ratio" in entry.options and entry.options.get("k") is None
        if has_ratio and not entry.options["reorder"] and any(rows_of(m.result) is not None for m in column):
            groups.setdefault(entry.options["ratio"], []).append(entry)
    for ratio, entries in sorted(groups.items()):
        found = overlap(comparison, entries) if len(entries) > 1 else None
        if found is None:
            continue
        lines = [
            [str(number), _without_ratio(a), *(percent(fmean(found.shares[a, b])) for b in entries)]
            for number, a in enumerate(entries, 1)
        ]
        header = ["", "method", *(str(number) for number in range(1, len(entries) + 1))]
        num_samples = len(found.chance[entries[0]])
        caption = (
            f"{title}, ratio={ratio}, N = {num_samples}: {percent(found.mean_chance)} are shared by chance."
        )
        yield caption, Grid(header, lines, num_text=2)


def _without_ratio(entry: Entry) -> str:
    return " ".join(word for word in entry.title.split() if not word.startswith("ratio="))
