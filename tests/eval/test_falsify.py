"""The falsifier on results made up here: its numbers by hand, and each verdict that it can give."""

from __future__ import annotations

import json
from math import inf, nan
from typing import TYPE_CHECKING

import pytest
from made_results import Samples, write

from kvloom.cli.falsify import Local
from kvloom.errors import EvalError, MethodError
from kvloom.eval.falsify import LOCAL, Findings, findings, judge, methods
from kvloom.eval.runner import Method
from kvloom.eval.statistics import Difference, Interval

if TYPE_CHECKING:
    from pathlib import Path

ORDER = ("full", "none", "random", "global", "hl-tp")


def column(kls: list[float], rows: list[str]) -> Samples:
    return {
        str(place): {"kl": kl, "rows": row} for place, (kl, row) in enumerate(zip(kls, rows, strict=True))
    }


def found(folder: Path, columns: dict[str, Samples], **given: int) -> Findings:
    labels = dict(zip(ORDER, methods(0.15, "hl-tp"), strict=True))
    write(folder, {"hotpotqa": {labels[name]: columns[name] for name in ORDER}}, **given)
    return findings(folder, [Method.parse(labels[name]) for name in ORDER], "hl-tp")


def columns() -> dict[str, Samples]:
    """Two samples: a gap of 1 and 3, of which global keys leave 0.5 each, local ones 0.5 and 1.5."""
    return {
        "full": column([0, 0], ["0-99", "0-99"]),
        "none": column([1, 3], ["", ""]),
        "random": column([1, 2], ["50-53", "60-63"]),
        "global": column([0.5, 0.5], ["60-63", "70-73"]),
        "hl-tp": column([0.5, 1.5], ["62-65", "70-73"]),
    }


def test_the_numbers_by_hand(tmp_path: Path) -> None:
    result = found(tmp_path / "a", columns())
    assert (result.shared.mean, result.shared.low, result.shared.high) == (0.75, 0.5, 1.0)
    assert result.chance == pytest.approx((4 / 50 + 4 / 40) / 2), (
        "random's first row tells where choice begins"
    )
    shares = {name: row.gap.mean for name, row in result.rows.items() if row.gap is not None}
    assert shares == {"full": 1, "none": 0, "random": 0.25, "global": 0.75, "hl-tp": 0.5}
    better = result.differences["global", "hl-tp"]
    # (2 - 1) / 4; of two samples drawn both are the first, or both the second, in a quarter each: 0 and 1/3
    assert (better.mean, better.low, better.high) == (0.25, 0, pytest.approx(1 / 3))
    assert better.p_value == 1, "one sample differs, and one sign says nothing"
    assert result.differences["global", "random"].mean == 0.5
    assert result.differences["hl-tp", "random"].mean == 0.25
    assert result.outcome == "open"
    assert result.verdict == (
        "The sets share 75 % of their rows (chance 9 %); global keys close 25 points more [0, 33]: "
        "the interval includes 0, so this data does not separate them."
    )


def test_the_numbers_as_json(tmp_path: Path) -> None:
    one = {name: {"0": samples["0"]} for name, samples in columns().items()}
    plain = json.loads(json.dumps(found(tmp_path / "a", one).as_dict(), allow_nan=False))
    assert plain["samples"] == 1
    assert plain["shared_rows"] == {"mean": 0.5, "low": None, "high": None}
    assert plain["differences"][0]["of"] == "global"
    assert plain["differences"][0]["less"] == "hl-tp"
    assert plain["methods"]["hl-tp"]["kl"] == 0.5
    assert "geometry='hl-tp'" in plain["methods"]["hl-tp"]["recipe"]
    assert plain["verdict"] == (
        "The sets share 50 % of their rows (chance 8 %); global keys close 0 points more, but one sample has "
        "no interval."
    )


def test_samples_that_a_method_lacks_are_left_out_and_said(tmp_path: Path) -> None:
    more = columns()
    for name in ORDER[:-1]:
        more[name]["2"] = more[name]["1"]
    result = found(tmp_path / "a", more)
    assert result.num_samples == 2
    assert len(result.remarks) == 1
    assert "Left out on hotpotqa: 1 of 3 samples" in result.remarks[0]


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    apart = columns()
    apart["hl-tp"] = {"7": apart["hl-tp"]["1"]}
    with pytest.raises(EvalError, match="has no sample that all methods have a finite KL on"):
        found(tmp_path / "a", apart)
    unsaid = columns()
    unsaid["global"] = column([0.5, 0.5], ["", ""])
    with pytest.raises(EvalError, match="does not say which rows were recomputed; give another --out"):
        found(tmp_path / "b", unsaid)
    for ratio in (0, 1):
        with pytest.raises(MethodError, match=f"above 0 and below 1, got {ratio}"):
            methods(ratio, "hl-tp")
    with pytest.raises(MethodError, match="hl-hp, hl-tp, tl-tp, got 'global'"):
        methods(0.15, "global")


def test_the_command_line_offers_every_local_geometry() -> None:
    assert {local.value for local in Local} == set(LOCAL)


SOME = Interval(0.61, 0.58, 0.64)
MORE = Difference(0.5, 0.4, 0.6, "", 0.001)
SHARED = "The sets share 61 % of their rows (chance 15 %)"


@pytest.mark.parametrize(
    ("shared", "difference", "outcome", "sentence"),
    [
        (
            SOME,
            (0.09, 0.04, 0.14),
            "stands",
            f"{SHARED}; global keys close 9 points more [4, 14]: the claim stands here.",
        ),
        (
            SOME,
            (-0.09, -0.14, -0.04),
            "falls",
            f"{SHARED}; local keys close 9 points more [4, 14]: the claim falls here.",
        ),
        (
            SOME,
            (-0.01, -0.05, 0.03),
            "open",
            f"{SHARED}; local keys close 1 point more [\N{MINUS SIGN}3, 5]: the interval includes 0, so this "
            "data does not separate them.",
        ),
        (
            SOME,
            (0.01, -0.01, 0.02),
            "falls",
            f"{SHARED}; global keys close 1 point more [\N{MINUS SIGN}1, 2], which is equal within 2 points: "
            "the claim falls here.",
        ),
        (
            Interval(0.95, 0.93, 0.97),
            (0.09, 0.04, 0.14),
            "falls",
            "The sets share 95 % of their rows (chance 15 %), which is nearly all, and global keys close 9 "
            "points more [4, 14]: the claim falls here.",
        ),
        (
            Interval(0.91, 0.89, 0.93),
            (0.09, 0.04, 0.14),
            "stands",
            "The sets share 91 % of their rows (chance 15 %); global keys close 9 points more [4, 14]: the "
            "claim stands here.",
        ),
        (
            SOME,
            (0.5, -inf, inf),
            "open",
            f"{SHARED}; global keys close 50 points more [\N{MINUS SIGN}∞, ∞]: the interval includes 0, so "
            "this data does not separate them.",
        ),
        (SOME, (nan, nan, nan), "open", f"{SHARED}; there is no gap: this data cannot tell."),
    ],
)
def test_every_verdict(
    shared: Interval, difference: tuple[float, float, float], outcome: str, sentence: str
) -> None:
    assert judge(shared, 0.15, Difference(*difference, "there is no gap", 0.5), MORE) == (outcome, sentence)


def test_a_claim_that_random_rows_may_match_is_said_to_stand_with_that_caveat() -> None:
    better = Difference(0.09, 0.04, 0.14, "", 0.01)
    outcome, verdict = judge(SOME, 0.15, better, Difference(0.05, -0.01, 0.1, "", 0.1))
    assert outcome == "stands"
    assert verdict.endswith("[4, 14]: the claim stands here, though random rows may do as well.")
