"""Needles: heatmaps of a set of needles in haystacks, by length and depth as in the paper's Fig. 3, and by
scoring layer and depth as in its Fig. 4.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from kvloom.eval import plots
from kvloom.eval.page import Heading
from kvloom.eval.runs import as_text, families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvloom.eval.comparison import Comparison
    from kvloom.eval.page import Block, Picture
    from kvloom.eval.runner import Result
    from kvloom.eval.runs import Entry

    Draw = Callable[[str, Callable[[str], str], str], Picture]
    Cells = dict[tuple[int, int], float]

MIN_LAYERS = 3
"""Entries of one layer each, below which a picture of layers says nothing."""

_KIND = re.compile(r"length=(\d+),depth=(\d+)")


def is_needle(kind: str) -> bool:
    """Whether this is the kind of a needle's sample."""
    return _KIND.fullmatch(kind) is not None


class Measure(NamedTuple):
    """What the cells show."""

    name: str  # of the result's field
    words: str
    more_is_better: bool

    @property
    def sentence(self) -> str:
        """The words as a sentence begins."""
        return self.words[0].upper() + self.words[1:]


CONTAINS = Measure("contains", "share of answers that contain the needle", True)
F1 = Measure("f1", "F1", True)
KL = Measure("kl", "KL to full prefill, nats per token", False)
GAP = Measure("kl", "share of the KL gap closed", True)


def needles(name: str, comparison: Comparison, picture: Draw) -> Iterator[Block]:
    """The heatmaps of the set `name`; none where no sample is left."""
    if not comparison.num_samples:
        return
    measure = _measure(comparison)
    entries = [entry for entry in comparison.columns if measure != KL or not entry.is_full]
    cells = {entry.title: _by_length(comparison, entry, measure) for entry in entries}
    if cells:
        yield Heading(3, f"{name} by length and depth")
        yield picture(
            f"heatmap-{name}",
            lambda plot: plots.heatmaps(
                plot, cells, measure.words, top=_top(cells, measure), more_is_better=measure.more_is_better
            ),
            f"{measure.sentence}, mean over the samples of a cell, by length of the text and depth of the "
            "needle.",
        )
    if found := _single_layers(comparison):
        yield from _layer_map(name, comparison, found, picture)


def _layer_map(
    name: str, comparison: Comparison, found: dict[str, list[Entry]], picture: Draw
) -> Iterator[Block]:
    measure = _measure(comparison)
    if measure == KL and comparison.anchor("none"):
        measure = GAP
    cells = {
        title: {
            (int(as_text(entry.options["layers"])), depth): value
            for entry in family
            for depth, value in _by_depth(comparison, entry, measure).items()
        }
        for title, family in found.items()
    }
    yield Heading(3, f"{name} by layer and depth")
    yield picture(
        f"layer-map-{name}",
        lambda plot: plots.heatmaps(
            plot,
            cells,
            measure.words,
            top=_top(cells, measure),
            more_is_better=measure.more_is_better,
            across="layer that scores",
        ),
        f"{measure.sentence}, over all lengths, by the one layer whose attention scores and depth of the "
        "needle, all else equal.",
    )


def _measure(comparison: Comparison) -> Measure:
    """The first that every result has."""
    results = [measured.result for column in comparison.columns.values() for measured in column]
    for measure in (CONTAINS, F1):
        if all(getattr(result, measure.name) is not None for result in results):
            return measure
    return KL


def _single_layers(comparison: Comparison) -> dict[str, list[Entry]]:
    """`infoflow` entries that score one layer each and differ in nothing else, by what they share."""
    singles = [
        entry
        for entry in comparison.columns
        if entry.name == "infoflow" and as_text(entry.options.get("layers", "")).isdigit()
    ]
    return {
        " ".join(word for word in family[0].title.split() if not word.startswith("layers=")): family
        for family in families(singles, "layers")
        if len(family) >= MIN_LAYERS
    }


def _by_length(comparison: Comparison, entry: Entry, measure: Measure) -> Cells:
    """The mean by length and depth."""
    values: dict[tuple[int, int], list[float]] = {}
    for measured, value in zip(
        comparison.columns[entry], comparison.values(entry, measure.name), strict=True
    ):
        values.setdefault(_place(measured.result), []).append(value)
    return {cell: fmean(held) for cell, held in values.items()}


def _by_depth(comparison: Comparison, entry: Entry, measure: Measure) -> dict[int, float]:
    """The mean by depth, or the share of the gap closed; a depth without a gap is left out."""
    depths = {_place(measured.result)[1] for measured in comparison.columns[entry]}
    none = comparison.anchor("none")
    found = {}
    for depth in sorted(depths):
        there = comparison.where(lambda result, depth=depth: _place(result)[1] == depth)
        mean = fmean(there.values(entry, measure.name))
        if measure == GAP:
            assert none is not None, "a gap is measured from none"
            gap = fmean(there.values(none, measure.name))
            if gap > 0:
                found[depth] = 1 - mean / gap
        else:
            found[depth] = mean
    return found


def _place(result: Result) -> tuple[int, int]:
    """Length and depth."""
    found = _KIND.fullmatch(result.kind)
    assert found is not None, result.kind
    return int(found[1]), int(found[2])


def _top(cells: dict[str, Cells], measure: Measure) -> float:
    """The end of the scale."""
    if measure.more_is_better:
        return 1.0
    return max(value for by_cell in cells.values() for value in by_cell.values())
