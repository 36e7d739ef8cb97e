"""Where recomputed rows lie and how many methods share, on rows so few that all is worked out by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from made_results import NONE, Samples, grid, write

from kvloom.errors import EvalError
from kvloom.eval.report import report

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("undrawn")
WHERE, OVERLAP = "Where the recomputed rows lie", "Overlap of the recomputed sets"


def with_rows(*rows: str | None, **given: Any) -> Samples:
    """Samples 1, 2, ... of 100 context rows, unless said otherwise, of which these were recomputed."""
    return {
        str(place): {"kl": 0.5, "rows": text} | given if text is not None else {"kl": 0.5} | given
        for place, text in enumerate(rows, 1)
    }


def text_of(tmp_path: Path, methods: dict[str, Samples]) -> str:
    return report([write(tmp_path / "a", {"hotpotqa": methods})]).markdown


def test_where_rows_lie_by_hand(tmp_path: Path) -> None:
    flow = with_rows("20-24,90", "150,199")
    flow["2"]["context_tokens"] = 200
    flow["1"]["rope_similarity"], flow["2"]["rope_similarity"] = 0.5, 0.25
    full = with_rows("0-99", "0-199", rope_similarity=0.125)
    full["2"]["context_tokens"] = 200
    text = text_of(tmp_path, {"full": full, "none": NONE, "infoflow": flow})
    row, whole = grid(text, WHERE)
    assert (row["method"], row["N"], row["options"]) == ("infoflow", "2", "ratio=0.15")
    # of sample 1 five of six rows lie in the second fifth and one in the last; of sample 2 one in the fourth
    # and one in the last
    shares = [row[name] for name in ("1st fifth", "2nd", "3rd", "4th", "5th")]
    assert shares == ["0 %", "42 %", "0 %", "25 %", "33 %"]
    assert row["position"] == "0.61", "the mean of 33.33 / 99 and 174.5 / 199"
    assert row["distance"] == "52", "the mean of 100 - 22.5 and 200 - 174.5, to the even 51.5"
    assert row["RoPE similarity"] == "0.375"
    assert (whole["method"], whole["position"], whole["RoPE similarity"]) == ("full", "0.50", "0.125")
    assert [whole[name] for name in ("1st fifth", "5th")] == ["20 %", "20 %"]


def test_a_sample_without_rows_or_similarity_does_not_blur_the_rest(tmp_path: Path) -> None:
    flow = with_rows("99", None)
    flow["1"]["rope_similarity"] = 0.5
    epic = with_rows("99", "99")
    epic["1"]["rope_similarity"] = 0.5
    rows = grid(text_of(tmp_path, {"infoflow": flow, "epic": epic}), WHERE)
    assert [(row["method"], row["N"], row["RoPE similarity"]) for row in rows] == [
        ("infoflow", "1", "0.500"),
        ("epic", "2", ""),
    ]


def test_the_sections_are_left_out_where_there_is_nothing_to_say(tmp_path: Path) -> None:
    old = write(tmp_path / "a", {"hotpotqa": {"none": NONE, "infoflow": with_rows(None, None)}})
    lines = [json.loads(line) for line in (old / "results.jsonl").read_text().splitlines()]
    for line in lines:
        del line["rope_similarity"], line["contains"]
    (old / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    only_full = {"full": with_rows("0-99", "0-99"), "none": with_rows("", "")}
    for text in (report([old]).markdown, text_of(tmp_path / "b", only_full)):
        assert WHERE not in text
        assert OVERLAP not in text


def test_overlap_by_hand(tmp_path: Path) -> None:
    methods = {
        "full": with_rows("0-99", "0-99"),
        "none": NONE,
        "infoflow": with_rows("50-53", "60-63"),
        "infoflow:geometry=hl-tp": with_rows("52-55", "60-63"),
        "random": with_rows("90-93", "60,70,80,90"),
        "infoflow:reorder=true": with_rows("0-3", "0-3"),
        "epic:k=2": with_rows("10-11", "10-11"),
        "infoflow:ratio=0.3": with_rows("50-59", "50-59"),
    }
    text = text_of(tmp_path, methods)
    matrix = [[line[name] for name in ("method", "1", "2", "3")] for line in grid(text, OVERLAP)]
    assert matrix == [
        ["infoflow", "100 %", "75 %", "12 %"],  # (2/4 + 1) / 2; (0 + 1/4) / 2, rounded half to even
        ["infoflow geometry=hl-tp", "75 %", "100 %", "12 %"],
        ["random", "12 %", "12 %", "100 %"],
    ]
    # 4 rows of the 50 from row 50 on, and of the 40 from row 60 on
    assert "hotpotqa, ratio=0.15, N = 2: 9 % are shared by chance." in text
    assert text.count("are shared by chance") == 1, "no other method has ratio=0.3"


def test_overlap_is_a_share_of_the_lines_own_rows(tmp_path: Path) -> None:
    text = text_of(tmp_path, {"infoflow": with_rows("50-59"), "cacheblend": with_rows("55-59")})
    first, second = grid(text, OVERLAP)
    assert (first["2"], second["1"]) == ("50 %", "100 %")


def test_overlap_takes_samples_in_which_all_have_rows_and_pools_sets_once(tmp_path: Path) -> None:
    sets = {
        name: {"infoflow": with_rows("50", "60", None), "random": with_rows("50", "61", "70")}
        for name in ("hotpotqa", "musique")
    }
    text = report([write(tmp_path / "a", sets)]).markdown
    assert [line["2"] for line in grid(text, OVERLAP)] == ["50 %", "100 %"]
    assert "all sets, ratio=0.15, N = 4:" in text
    assert text.count("are shared by chance") == 1
    assert {line["set"] for line in grid(text, WHERE)} == {"all sets", "hotpotqa", "musique"}


@pytest.mark.parametrize("rows", ["4-x", "a,b", "99-100", "9,3", [3, 4]])
def test_rows_that_are_none_of_the_contexts_are_refused(tmp_path: Path, rows: Any) -> None:
    folder = write(tmp_path / "a", {"hotpotqa": {"infoflow": with_rows(rows)}})
    with pytest.raises(EvalError, match=r"infoflow on hotpotqa 1 names rows .* of 100 context rows"):
        report([folder])
