"""eval and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from command_line import Kvloom

DATA = Path(__file__).parent.parent / "eval" / "data"


def test_eval_measures_resumes_and_reports(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("eval", "hotpotqa", "-m", tiny_model, "--data", DATA, "--out", out, "--limit", "2")
    methods = (
        "-s",
        "full",
        "-s",
        "none",
        "-s",
        "infoflow:ratio=0.3",
        "-s",
        "infoflow:ratio=0.3,reorder=true",
    )
    done = kvloom.ok(*args, *methods, "--max-new-tokens", "4", "--json").json
    assert done["results"] == 8
    lines = (out / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert {(r["benchmark"], r["method"]) for r in results} == {
        ("hotpotqa", m) for m in ("full", "none", "infoflow:ratio=0.3", "infoflow:ratio=0.3,reorder=true")
    }
    assert all(r["f1"] is not None for r in results)
    (out / "results.jsonl").write_text("\n".join(lines[:5]) + "\n")
    kvloom.ok(*args, *methods, "--max-new-tokens", "4")
    again = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["sample"], r["method"], r["kl"]) for r in again] == [
        (r["sample"], r["method"], r["kl"]) for r in results
    ]
    reported = kvloom.ok("report", out)
    assert "infoflow:ratio=0.3" in reported.stdout
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert (out / "report.md").read_text().strip() == reported.stdout.strip()
    assert "Paired tests against infoflow ratio=0.3" in reported.stdout
    assert "Where the recomputed rows lie" in reported.stdout
    other = kvloom.ok("report", out, "--baseline", "none", "--out", tmp_path / "other").stdout
    assert "### Paired tests against none\n" in other
    refused = kvloom.refused("report", out, "--baseline", "epic")
    assert refused.startswith(
        "the baseline 'epic' is not in the results; there are: none, infoflow:ratio=0.3"
    )


def test_bad_input_is_one_sentence(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("-m", tiny_model, "--data", DATA, "--out", out)
    assert "did you mean 'hotpotqa'" in kvloom.refused("eval", "hotpotq", *args)
    assert "did you mean 'infoflow'" in kvloom.refused("eval", "hotpotqa", "-s", "infoflo", *args)
    missing = kvloom.refused("eval", "hotpotqa", "-m", tiny_model, "--data", tmp_path / "no", "--out", out)
    assert "does not exist" in missing
    kvloom.ok("eval", "hotpotqa", "-s", "none", "--limit", "1", *args)
    refused = kvloom.refused("eval", "hotpotqa", "-s", "none", "--limit", "2", *args)
    assert "another recipe (limit 1 there, 2 now" in refused
    (tmp_path / "empty").mkdir()
    assert "run.json" in kvloom.refused("report", tmp_path / "empty")
