"""falsify: from sets and a model to a verdict, computed from what the run holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvloom.trace import from_ranges

if TYPE_CHECKING:
    from command_line import Kvloom

DATA = Path(__file__).parent.parent / "eval" / "data"


def test_one_command_runs_resumes_and_judges(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("falsify", "hotpotqa", "-m", tiny_model, "--data", DATA, "--out", out, "--local", "tl-tp")
    args = (*args, "--ratio", "0.3", "--limit", "2")
    found = kvloom.ok(*args, "--json").json
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    recipes = {what: method["recipe"] for what, method in found["methods"].items()}
    assert list(recipes) == ["full", "none", "random", "global", "tl-tp"]
    assert "geometry='tl-tp'" in recipes["tl-tp"]
    assert "geometry='global'" in recipes["global"]
    kl = {(line["recipe"], line["sample"]): line["kl"] for line in lines}
    rows = {(line["recipe"], line["sample"]): set(from_ranges(line["trace"]["rows"])) for line in lines}
    assert found["samples"] == 2
    shares = []
    for sample in ("h1", "h2"):
        chosen, local = rows[recipes["global"], sample], rows[recipes["tl-tp"], sample]
        shares.append(len(chosen & local) / len(chosen))
    assert found["shared_rows"]["mean"] == pytest.approx(sum(shares) / 2)
    totals = {what: sum(kl[recipe, sample] for sample in ("h1", "h2")) for what, recipe in recipes.items()}
    for what in ("random", "global", "tl-tp"):
        gap = found["methods"][what]["kl_gap_closed"]["mean"]
        assert gap == pytest.approx(1 - totals[what] / totals["none"])
    less = found["differences"][0]
    assert (less["of"], less["less"]) == ("global", "tl-tp")
    assert less["mean"] == pytest.approx((totals["tl-tp"] - totals["global"]) / totals["none"])
    # the last line is lost, as by a crash: only that one is run again
    text = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(text[:-1]))
    printed = kvloom.ok(*args).stdout
    assert printed.splitlines()[-1] == found["verdict"]
    assert (out / "results.jsonl").read_text().splitlines(keepends=True)[:-1] == text[:-1]
    assert "infoflow, local keys (tl-tp)" in printed
    kvloom.ok("report", out)


def test_bad_input_is_one_sentence(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    def refused(*args: str) -> str:
        return kvloom.refused(
            "falsify", "hotpotqa", "-m", tiny_model, "--data", DATA, "--out", tmp_path / "run", *args
        )

    assert refused("--ratio", "1").startswith("ratio is the share of rows to recompute, above 0 and below 1")
    assert "'global' is not one of" in refused("--local", "global")
    assert refused("--max-context", "3").startswith("none of 3 samples fits the model's context or --max-con")
    assert "another recipe (limit null there, 1 now" in refused("--limit", "1")
