"""Falsify: the test that InfoFlow KV's claim about rotary geometry can fail.

A public review of the paper asked for it: select once with keys moved to their global positions, and once
with keys left where their chunks were prefilled. If the two sets of rows are nearly the same, or what comes
of them is equally good, the claim falls. Random rows run along, as the least that a choice must beat.

"Nearly the same" and "equally good" are intervals, not points: the whole 95 % interval of the shared rows
above ``NEARLY_SAME``, or that of the difference within ``EQUAL``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, Literal

from kvloom.errors import EvalError, MethodError
from kvloom.eval.comparison import SEED, Comparison, Row, compare, rows
from kvloom.eval.recomputed import overlap
from kvloom.eval.runs import merge, read
from kvloom.eval.statistics import Difference, Interval, gap_closed, paired_bootstrap, paired_difference
from kvloom.eval.tables import percent, whole
from kvloom.layout import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvloom.eval.runner import Method
    from kvloom.eval.runs import Entry

NEARLY_SAME = 0.9
EQUAL = 0.02  # of the gap
LOCAL = tuple(name for name in LAYOUTS if name != "global")

Outcome = Literal["stands", "falls", "open"]


def methods(ratio: float, local: str) -> list[str]:
    """The methods to run, as `kvloom eval` takes them: full, none, random, global keys, local keys.

    Raises ``MethodError`` for a ratio that leaves nothing to choose and for another geometry.
    """
    if not 0 < ratio < 1:
        raise MethodError(f"ratio is the share of rows to recompute, above 0 and below 1, got {ratio}")
    if local not in LOCAL:
        raise MethodError(f"the local geometry is one of {', '.join(LOCAL)}, got {local!r}")
    return [
        "full",
        "none",
        f"random:ratio={ratio}",
        f"infoflow:ratio={ratio},geometry=global",
        f"infoflow:ratio={ratio},geometry={local}",
    ]


@dataclass(frozen=True)
class Findings:
    """What the test found, over all sets pooled."""

    local: str
    num_samples: int
    shared: Interval  # of the rows that global keys choose, those that local keys choose too
    chance: float  # what random rows would share
    rows: dict[str, Row]  # by what it is: none, random, global, the local geometry, full
    differences: dict[tuple[str, str], Difference]  # in the share of the gap closed, first less second
    outcome: Outcome
    verdict: str
    remarks: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; a number that cannot be had is None."""
        return {
            "samples": self.num_samples,
            "shared_rows": _plain(self.shared),
            "chance": self.chance,
            "methods": {
                name: {
                    "recipe": row.entry.recipe,
                    "kl_gap_closed": None if row.gap is None else _plain(row.gap),
                    "first_token_gap_closed": None if row.first_gap is None else _plain(row.first_gap),
                    "kl": row.kl,
                    "rows": row.rows,
                }
                for name, row in self.rows.items()
            },
            "differences": [
                {"of": first, "less": second, **_plain(found), "p_value": found.p_value}
                for (first, second), found in self.differences.items()
            ],
            "outcome": self.outcome,
            "verdict": self.verdict,
            "remarks": self.remarks,
        }


def _plain(interval: Interval) -> dict[str, float | None]:
    values = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {name: value if isfinite(value) else None for name, value in values.items()}


def findings(folder: Path, ran: Sequence[Method], local: str) -> Findings:
    """What the run in `folder` says; `ran` are the methods of `methods`, in that order.

    Raises ``EvalError`` for a run in which no sample has been run by all of them, or rows are missing.
    """
    comparison = compare(merge([read(folder)])[0].tables)
    recipes = dict(zip(("full", "none", "random", "global", local), (m.recipe for m in ran), strict=True))
    by_recipe = {row.entry.recipe: row for row in rows(comparison)}
    if missing := [name for name, recipe in recipes.items() if recipe not in by_recipe]:
        raise EvalError(
            f"{str(folder)!r} has no sample that all methods have a finite KL on ({', '.join(missing)}); "
            "name other sets"
        )
    held = {name: by_recipe[recipe] for name, recipe in recipes.items()}
    chosen = [held[name].entry for name in ("global", local, "random")]
    found = overlap(comparison, chosen)
    if found is None:
        raise EvalError(f"{str(folder)!r} does not say which rows were recomputed; give another --out folder")
    shared = paired_bootstrap(found.shares[chosen[0], chosen[1]], seed=SEED)
    pairs = [("global", local), ("global", "random"), (local, "random")]
    differences = {
        (first, second): _difference(comparison, held["none"].entry, held[first].entry, held[second].entry)
        for first, second in pairs
    }
    chance = found.mean_chance
    outcome, verdict = judge(shared, chance, differences["global", local], differences["global", "random"])
    return Findings(
        local, comparison.num_samples, shared, chance, held, differences, outcome, verdict, comparison.remarks
    )


def _difference(comparison: Comparison, none: Entry, first: Entry, second: Entry) -> Difference:
    """How much more of the KL gap `first` closes than `second`: the p-value is that of their KL."""
    gaps, one, other = ([*comparison.values(entry, "kl")] for entry in (none, first, second))
    # 1 - sum(none + one - other) / sum(none) is sum(other - one) / sum(none): the difference of the shares
    rest = [gap + kl - than for gap, kl, than in zip(gaps, one, other, strict=True)]
    share = gap_closed(gaps, rest, seed=SEED)
    p_value = paired_difference(other, one, seed=SEED).p_value
    return Difference(share.mean, share.low, share.high, share.reason, p_value)


def judge(
    shared: Interval, chance: float, difference: Difference, than_random: Difference
) -> tuple[Outcome, str]:
    """Whether the claim stands, and the sentence that says so: `difference` is global less local keys,
    `than_random` global keys less random rows.
    """
    share = f"The sets share {percent(shared.mean)} of their rows (chance {percent(chance)})"
    if isnan(difference.mean):
        return "open", f"{share}; {difference.reason}: this data cannot tell."
    better, by, ends = "global", whole(difference.mean), (difference.low, difference.high)
    if difference.mean < 0:
        better, by, ends = "local", whole(-difference.mean), (-difference.high, -difference.low)
    more = f"{better} keys close {by} point{'' if by == '1' else 's'} more"
    if isnan(difference.low):
        return "open", f"{share}; {more}, but {difference.reason}."
    low, high = ends
    quality = f"{more} [{whole(low)}, {whole(high)}]"
    if shared.low >= NEARLY_SAME:
        return "falls", f"{share}, which is nearly all, and {quality}: the claim falls here."
    if max(abs(low), abs(high)) <= EQUAL:
        return (
            "falls",
            f"{share}; {quality}, which is equal within {whole(EQUAL)} points: the claim falls here.",
        )
    if low <= 0 <= high:
        return "open", f"{share}; {quality}: the interval includes 0, so this data does not separate them."
    if better == "local":
        return "falls", f"{share}; {quality}: the claim falls here."
    caveat = "" if than_random.low > 0 else ", though random rows may do as well"
    return "stands", f"{share}; {quality}: the claim stands here{caveat}."
