"""Results: the tables and plots of runs that belong together, in reading order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvloom.eval import plots
from kvloom.eval.benchmark import benchmarks
from kvloom.eval.comparison import Comparison, best_infoflow, compare, rows
from kvloom.eval.needles import is_needle, needles
from kvloom.eval.page import Bullets, Heading, Paragraph, Picture
from kvloom.eval.recomputed import overlaps, where
from kvloom.eval.runs import as_text, families
from kvloom.eval.tables import geometry_grid, main_grid, paired_grid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvloom.eval.comparison import Row
    from kvloom.eval.page import Block
    from kvloom.eval.runs import Entry, Section, Table

Drawing = Callable[[str], str]
_UNCORRECTED = (
    "Methods are compared as they are, budgets included. Two-sided sign-flip test over samples; p-values are "
    "not corrected for the number of comparisons, and a baseline that was picked as the best of several on "
    "these samples looks better than it is."
)


class Results:
    """Of one section. `prefix` tells its plots from other sections'; `baseline` is what the paired tests are
    against.
    """

    def __init__(self, section: Section, prefix: str = "", baseline: str | None = None) -> None:
        self._section, self._prefix, self._wanted = section, prefix, baseline
        self._pooled = _pooled(section)
        self._comparisons: dict[str, Comparison] = {}  # sets pooled, where there are several; each set
        if len(self._pooled) > 1:
            self._comparisons["all sets"] = compare({name: section.tables[name] for name in self._pooled})
        self._comparisons |= {name: compare({name: table}) for name, table in section.tables.items()}
        self._rows = {title: rows(comparison) for title, comparison in self._comparisons.items()}

    def blocks(self) -> Iterator[Block]:
        """Main tables, plots, tests, and what only some runs have: kinds, needles, layers, rows, ..."""
        for title, comparison in self._comparisons.items():
            yield Heading(3, f"Results: {title}")
            apart = [name for name in self._section.tables if name not in self._pooled]
            if title == "all sets" and apart:
                yield Paragraph(f"{', '.join(self._pooled)} pooled; {', '.join(apart)} is apart, below.")
            yield from _table(comparison, {title: self._rows[title]})
        yield from self._plots()
        yield from self._paired()
        yield from self._multihop()
        for name in self._section.tables:
            yield from self._kinds(name)
        yield from self._geometries()
        yield from self._layers()
        yield from where(self._comparisons)
        yield from overlaps(self._apart())

    def _apart(self) -> dict[str, Comparison]:
        """The comparisons that have no sample in common: sets that are pooled are not there twice."""
        single = len(self._pooled) == 1
        return {
            title: comparison
            for title, comparison in self._comparisons.items()
            if single or title not in self._pooled
        }

    def _picture(self, name: str, draw: Drawing, caption: str) -> Picture:
        return Picture(self._prefix + name, draw(self._prefix + name), caption)

    def _plots(self) -> Iterator[Block]:
        held = {title: found for title, found in self._rows.items() if found}
        if any(row.gap is not None for found in held.values() for row in found):
            yield Heading(3, "Quality against cost")
            yield self._picture(
                "quality",
                lambda name: plots.quality(name, held),
                "Share of the KL gap closed against token-layers, with 95 % intervals; methods that differ "
                "in their budget only are joined. The axis ends at \N{MINUS SIGN}100 %.",
            )
        for title, found in held.items():
            yield Heading(3, "Time to first token")
            yield self._picture(
                "ttft", lambda name, found=found: plots.ttft(name, found), f"Medians over samples, {title}."
            )
            break

    def _baseline(self) -> Entry | None:
        every = [entry for comparison in self._comparisons.values() for entry in comparison.columns]
        if self._wanted is not None:
            called = [entry for entry in every if entry.is_called(self._wanted)]
            if called:
                return called[0]
        found = [best_infoflow(comparison) for comparison in self._comparisons.values()]
        best = [entry for entry in found if entry is not None]
        return next((entry for entry in best if entry.name == "infoflow"), next(iter(best), None))

    def _paired(self) -> Iterator[Block]:
        baseline = self._baseline()
        if baseline is None:
            return
        grid = paired_grid(self._comparisons, baseline)
        if grid.rows:
            yield Heading(3, f"Paired tests against {baseline.title}")
            yield Paragraph(
                "KL of the method minus KL of the baseline on the same samples, below 0 where the method is "
                f"nearer to full prefill. {_UNCORRECTED}"
            )
            yield grid

    def _multihop(self) -> Iterator[Block]:
        yield Heading(3, "Multi-hop apart")
        groups: dict[str, list[str]] = {}
        for name in self._pooled:
            cls = benchmarks.get(name)
            hops = "unknown" if cls is None else "multi-hop" if cls.is_multihop else "single-hop"
            groups.setdefault(hops, []).append(name)
        for hops, names in groups.items():
            yield Paragraph(f"{hops.capitalize()}: {', '.join(names)}.")
        if len(groups) > 1:
            tables = self._section.tables
            for hops, names in groups.items():
                comparison = compare({name: tables[name] for name in names})
                yield from _table(comparison, {hops: rows(comparison)}, "sets")
        else:
            yield Paragraph("There is nothing to set apart.")

    def _kinds(self, name: str) -> Iterator[Block]:
        comparison = self._comparisons[name]
        results = [measured.result for measured in next(iter(comparison.columns.values()))]
        kinds = sorted({result.kind for result in results})
        if kinds and all(map(is_needle, kinds)):
            yield from needles(name, comparison, self._picture)
        elif len(kinds) > 1:
            by_kind = {
                kind or "(unknown)": rows(comparison.where(lambda result, kind=kind: result.kind == kind))
                for kind in kinds
            }
            yield Heading(3, f"{name} by kind")
            yield main_grid(by_kind, "kind")
            if comparison.anchor("none") and not all(e.is_none or e.is_full for e in comparison.columns):
                yield self._picture(
                    f"kinds-{name}",
                    lambda plot: plots.kinds(plot, by_kind),
                    f"Share of the KL gap closed on {name} by kind, with 95 % intervals. "
                    "The axis ends at \N{MINUS SIGN}100 %.",
                )

    def _families(self, option: str) -> Iterator[list[Entry]]:
        """`infoflow` entries that differ in `option` only, two or more."""
        every = dict.fromkeys(entry for table in self._section.tables.values() for entry in table)
        for family in families((entry for entry in every if entry.name == "infoflow"), option):
            if len(family) > 1:
                yield family

    def _geometries(self) -> Iterator[Block]:
        for family in self._families("geometry"):
            yield Heading(3, "Geometries")
            yield Paragraph(f"Positions while scoring, all else equal: {_common(family, 'geometry')}.")
            yield geometry_grid(family, self._rows)

    def _layers(self) -> Iterator[Block]:
        found = [sorted(family, key=_by_layer) for family in self._families("layers")]
        for title, held in self._rows.items():
            by_entry = {row.entry: row for row in held}
            groups = {
                _common(family, "layers"): [
                    (as_text(entry.options["layers"]), by_entry[entry])
                    for entry in family
                    if entry in by_entry
                ]
                for family in found
            }
            groups = {label: points for label, points in groups.items() if len(points) > 1}
            if groups and self._comparisons[title].anchor("none"):
                yield Heading(3, f"Scoring layers: {title}")
                yield self._picture(
                    f"layers-{title}".replace(" ", "-"),
                    lambda name, groups=groups: plots.layers(name, groups),
                    f"Share of the KL gap closed on {title} by the layers that score, all else equal.",
                )


def _pooled(section: Section) -> list[str]:
    """The sets to be taken together: all but needles in haystacks, unless there is nothing else."""
    names = [name for name, table in section.tables.items() if not all(map(is_needle, _kinds_of(table)))]
    return names or list(section.tables)


def _kinds_of(table: Table) -> set[str]:
    return {measured.result.kind for column in table.values() for measured in column.values()}


def _table(comparison: Comparison, groups: dict[str, list[Row]], lead: str | None = None) -> Iterator[Block]:
    if comparison.remarks:
        yield Bullets(comparison.remarks)
    if any(groups.values()):
        yield main_grid(groups, lead)
    else:
        yield Paragraph("No sample has been run by all methods.")


def _common(family: list[Entry], option: str) -> str:
    """The method and all of its options but one, as in ``infoflow ratio=0.15 query=question``."""
    options = family[0].options.items()
    words = [f"{name}={as_text(value)}" for name, value in options if name not in (option, "reorder")]
    reorder = family[0].options["reorder"]
    return " ".join([family[0].name, *words, *([f"reorder={reorder}"] if reorder else [])])


def _by_layer(entry: Entry) -> tuple[bool, list[float], str]:
    """Single layers by number, then bands by where they begin."""
    text = as_text(entry.options["layers"])
    numbers = [float(number) for number in re.findall(r"[\d.]+", text)]
    return not text.replace(",", "").isdigit(), numbers, text
