"""Comparison: methods side by side on the same samples, in quality and in cost.

Only samples that every method compared has been run on count. Intervals hold 95 % of paired bootstrap
resamples over samples, all drawn with one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median
from typing import TYPE_CHECKING

from kvloom.eval.statistics import Difference, Interval, gap_closed, paired_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvloom.eval.runner import Result
    from kvloom.eval.runs import Entry, Measurement, Table

SEED = 0
STAGES = ("load", "prefill", "splice", "score", "recompute", "first_token")
"""Parts of the time to first token, in order."""


@dataclass(frozen=True)
class Row:
    """One method's numbers: means over samples, unless said otherwise. None: not measured."""

    entry: Entry
    num_samples: int
    gap: Interval | None  # share of the KL gap closed, over all answer tokens; None without the anchor
    first_gap: Interval | None  # the same over first answer tokens
    kl: float
    first_kl: float
    nll: float
    agreement: float
    f1: float | None
    exact_match: float | None
    contains: float | None
    rows: float
    rows_share: float  # of the context's rows
    token_layers: float
    token_layers_share: float | None  # of full prefill's
    ttft_ratio: float | None  # median of the ratios to full prefill of the same sample in the same run
    ttft_ms: float  # median
    stages_ms: dict[str, float]  # median of each
    kv_mb: float


@dataclass(frozen=True)
class Comparison:
    """Methods on samples that all of them have: item i of every column is of the same sample."""

    columns: dict[Entry, list[Measurement]]
    remarks: list[str]  # what was left out

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def where(self, is_wanted: Callable[[Result], bool]) -> Comparison:
        """The samples for which the claim holds, a claim that does not depend on the method."""
        return Comparison(
            {entry: [m for m in column if is_wanted(m.result)] for entry, column in self.columns.items()}, []
        )

    def values(self, entry: Entry, name: str) -> list[float]:
        """A number of the results, one per sample."""
        return [getattr(measured.result, name) for measured in self.columns[entry]]

    def traced(self, entry: Entry, name: str) -> list[float]:
        """A count of the traces, one per sample."""
        return [measured.result.trace[name] for measured in self.columns[entry]]

    def anchor(self, name: str) -> Entry | None:
        """The entry that is the anchor "none" or "full"."""
        return next((e for e in self.columns if (e.is_none if name == "none" else e.is_full)), None)


def compare(tables: Mapping[str, Table]) -> Comparison:
    """The methods that all these sets have, on the samples that all of them have, sets pooled."""
    every = dict.fromkeys(entry for table in tables.values() for entry in table)
    shared = [entry for entry in every if all(entry in table for table in tables.values())]
    columns: dict[Entry, list[Measurement]] = {entry: [] for entry in shared}
    remarks: list[str] = []
    if absent := [entry.title for entry in every if entry not in columns]:
        remarks.append(f"Not on all of {', '.join(tables)}, so left out here: {', '.join(absent)}.")
    for name, table in tables.items():
        seen = dict.fromkeys(sample for entry in shared for sample in table[entry])
        kept = [
            sample
            for sample in seen
            if all(sample in table[entry] and _is_finite(table[entry][sample]) for entry in shared)
        ]
        for entry in shared:
            columns[entry] += [table[entry][sample] for sample in kept]
        if len(kept) < len(seen):
            remarks.append(_left_out(name, {entry: table[entry] for entry in shared}, list(seen), len(kept)))
    return Comparison(columns, remarks)


def _is_finite(measured: Measurement) -> bool:
    result = measured.result
    return isfinite(result.kl) and isfinite(result.first_kl) and isfinite(result.nll)


def _left_out(name: str, table: Table, seen: list[str], num_kept: int) -> str:
    causes = []
    for entry, measured in table.items():
        missing = len(seen) - len(measured)
        infinite = sum(not _is_finite(value) for value in measured.values())
        if missing:
            causes.append(f"{entry.title} lacks {missing}")
        if infinite:
            causes.append(f"{entry.title} has {infinite} whose KL or NLL is not a finite number")
    number = len(seen) - num_kept
    return f"Left out on {name}: {number} of {len(seen)} samples ({'; '.join(causes)})."


def rows(comparison: Comparison) -> list[Row]:
    """A row for each method; none where no sample is left."""
    return [_row(comparison, entry) for entry in comparison.columns] if comparison.num_samples else []


def _row(comparison: Comparison, entry: Entry) -> Row:
    column = comparison.columns[entry]
    full = comparison.anchor("full")
    token_layers = fmean(comparison.traced(entry, "token_layers"))
    whole = fmean(comparison.traced(full, "token_layers")) if full else None
    num_rows = fmean(comparison.traced(entry, "recomputed_rows"))
    seconds = [measured.result.trace["seconds"] for measured in column]
    return Row(
        entry=entry,
        num_samples=len(column),
        gap=_gap(comparison, entry, "kl"),
        first_gap=_gap(comparison, entry, "first_kl"),
        kl=fmean(comparison.values(entry, "kl")),
        first_kl=fmean(comparison.values(entry, "first_kl")),
        nll=fmean(comparison.values(entry, "nll")),
        agreement=fmean(comparison.values(entry, "agreement")),
        f1=_mean([measured.result.f1 for measured in column]),
        exact_match=_mean([measured.result.exact_match for measured in column]),
        contains=_mean([measured.result.contains for measured in column]),
        rows=num_rows,
        rows_share=num_rows / fmean(comparison.traced(entry, "context_tokens")),
        token_layers=token_layers,
        token_layers_share=token_layers / whole if whole else None,
        ttft_ratio=_ttft_ratio(column),
        ttft_ms=1000 * median(taken["ttft"] for taken in seconds),
        stages_ms={stage: 1000 * median(taken.get(stage, 0.0) for taken in seconds) for stage in STAGES},
        kv_mb=fmean(comparison.traced(entry, "kv_bytes")) / 1e6,
    )


def _gap(comparison: Comparison, entry: Entry, name: str) -> Interval | None:
    none = comparison.anchor("none")
    if none is None:
        return None
    return gap_closed(comparison.values(none, name), comparison.values(entry, name), seed=SEED)


def _mean(values: list[float | None]) -> float | None:
    held = [value for value in values if value is not None]
    return fmean(held) if len(held) == len(values) else None


def _ttft_ratio(column: list[Measurement]) -> float | None:
    """None unless full prefill of every sample was timed in the same run: elsewhere the machine may have been
    another, or busy.
    """
    ratios = [
        measured.result.trace["seconds"]["ttft"] / measured.full_ttft_s
        for measured in column
        if measured.full_ttft_s
    ]
    return median(ratios) if len(ratios) == len(column) else None


def best_infoflow(comparison: Comparison) -> Entry | None:
    """The `infoflow` entry of the lowest mean KL; without any, the first method."""
    if not comparison.num_samples:
        return None
    found = [entry for entry in comparison.columns if entry.name == "infoflow"]
    if not found:
        return next(iter(comparison.columns), None)
    return min(found, key=lambda entry: fmean(comparison.values(entry, "kl")))


def difference(comparison: Comparison, entry: Entry, baseline: Entry, name: str) -> Difference:
    """The mean of `name`, "kl" or "first_kl", under `entry` minus that under `baseline`."""
    return paired_difference(comparison.values(entry, name), comparison.values(baseline, name), seed=SEED)
