"""verify, methods and demo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from command_line import copy_model

from kvloom.cli.show import type_text
from kvloom.compressors import compressors
from kvloom.demo import is_right
from kvloom.selectors import selectors

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


def test_verify_passes_or_not_by_its_exit_code(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    args = ("verify", texts, "-m", tiny_model)
    good = kvloom.ok(*args, "-q", "Who built the bridge?", "-o", "ratio=1", "--ratio", "0.5", "--json")
    assert good.stderr == ""
    report = good.json
    assert report["passed"] is True
    assert report["questions"] == ["Who built the bridge?"]
    assert report["recompute_all_error"] < 1e-4
    assert len(report["rotation_errors"]) == 4
    assert max(report["rotation_errors"]) < 1e-4
    ratios = {(method["name"], method["ratio"]): method["mean_kl"] for method in report["methods"]}
    assert list(ratios) == [("none", 0.0), ("infoflow", 0.5), ("infoflow", 1.0)]
    assert ratios["infoflow", 1.0] < 1e-6 < ratios["none", 0.0]

    bad = kvloom(*args, "-s", "none", "-q", "What did the abbey own?", "-q", "How old is it?")
    assert bad.code == 1
    assert "not passed: Reuse is exact where it claims to be, but none at 0%" in bad.stdout
    assert "moved keys     relative error at most" in bad.stdout
    assert "none *" in bad.stdout


def test_verify_makes_questions_and_says_so(
    kvloom: Kvloom, tiny_model: Path, texts: Path, many: Path
) -> None:
    done = kvloom.ok("verify", texts, "-m", tiny_model, "-o", "ratio=1", "--ratio", "0.15", "--json")
    assert done.json["questions"] == [
        "What does the text say about The bridge?",
        "What does the text say about The mill stands below the bridge?",
        "What does the text say about The abbey owned both, and sold?",
    ]
    assert done.sentence.startswith(
        "kvloom: no question given, so 3 questions made from the documents: What does"
    )
    done = kvloom.ok(
        "verify", many, "-m", tiny_model, "--top", "3", "-o", "ratio=1", "--ratio", "0.15", "--json"
    )
    assert len(done.json["questions"]) == 5


def test_verify_reads_questions_from_a_file(
    kvloom: Kvloom, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "answers": []}\n\n{"question": "When?"}\n')
    (tmp_path / "q.txt").write_text("Who?\nWhen?\n")
    for name in ("q.jsonl", "q.txt"):
        args = ("-o", "ratio=1", "--ratio", "0.15", "--json", "--questions", tmp_path / name)
        assert kvloom.ok("verify", texts, "-m", tiny_model, *args).json["questions"] == ["Who?", "When?"]


def test_methods_lists_every_method_with_its_options(kvloom: Kvloom) -> None:
    found = kvloom.ok("methods", "--json").json
    listed = {method["name"]: method for method in found if method["kind"] == "selector"}
    assert set(listed) == set(selectors)
    options = {option["name"]: option for option in listed["infoflow"]["options"]}
    assert options["ratio"] == {"name": "ratio", "type": "float", "required": False, "default": 0.15}
    assert options["query"]["type"] == "question or suffix"
    assert listed["full"]["options"] == []
    droppers = {method["name"]: method for method in found if method["kind"] == "compressor"}
    assert set(droppers) == set(compressors)
    assert droppers["infokv"]["phases"] == ["prefill", "decode"]
    assert droppers["snapkv"]["phases"] == ["prefill"]
    plain = kvloom.ok("methods").stdout
    for method in found:
        assert f"{method['name']}: {method['description']}\n" in plain
    assert "    k=...  int or none; default none\n" in plain


def test_type_text() -> None:
    assert type_text(tuple[int, ...] | None) == "[int, ...] or none"
    assert type_text(str) == "text"
    assert type_text(tuple[float, float]) == "[float, float]"


def test_demo_answers_by_three_methods(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_model, tmp_path / "roomy", without="nothing")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 32768  # its tokens are short
    (model / "config.json").write_text(json.dumps(config))
    first = kvloom("demo", "--questions", "2", "--json", patch=str(model))
    report = first.json
    assert first.code == 0
    assert len(report["questions"]) == 2
    assert report["reused_chunks"] == []
    for asked in report["questions"]:
        full, none, infoflow = asked["runs"]
        assert [run["label"] for run in asked["runs"]] == ["full prefill", "no recompute", "InfoFlow 15 %"]
        assert full["kl"] == 0 < infoflow["kl"]
        assert none["recomputed_rows"] == 0 < infoflow["recomputed_rows"] < full["recomputed_rows"]
        assert infoflow["recomputed_rows"] == int(0.15 * infoflow["context_tokens"])
        assert full["seconds"]["load"] == 0 < none["seconds"]["load"]
        for run in asked["runs"]:
            stages = {
                stage: taken for stage, taken in run["seconds"].items() if stage not in ("ttft", "decode")
            }
            assert run["seconds"]["ttft"] == pytest.approx(sum(stages.values()))
    assert [line["num_questions"] for line in report["summary"]] == [2, 2, 2]
    assert report["summary"][0]["median_ttft_ratio"] == 1
    assert report["footnote"].endswith("Made by: kvloom demo --questions 2")

    again = kvloom.ok("demo", "--questions", "1", patch=str(model))
    assert f"all {len(report['computed_chunks'])} passages were stored in disk:" in again.stderr
    assert "warmed up" in again.stderr
    assert report["questions"][0]["question"][:40] in again.stdout
    assert "InfoFlow 15 %" in again.stdout
    json.dumps(report, allow_nan=False)


def test_an_answer_is_right_when_it_holds_an_accepted_one() -> None:
    assert is_right("It was built by the Romans, in 1549.", ["1549"])
    assert is_right("the  OLD-BRIDGE!", ["an old bridge"])
    assert not is_right("in 15490", ["1549"])
    assert not is_right("", ["1549"])
