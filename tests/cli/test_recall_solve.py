"""recall and solve on a tiny model, and what they refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


@pytest.fixture
def data(tmp_path: Path) -> Path:
    passages = [{"title": "", "text": f"Barge {n} carried {n * 7} tons of stone."} for n in range(6)]
    question = {"id": "h1", "question": "What was on barge 4?", "answers": ["stone"], "passages": passages}
    sum_ = {"id": "g1", "question": "2 and 3?", "answers": ["5"], "worked_answer": "2 and 3 are 5, I think."}
    wish = {"id": "i1", "question": "Say it.", "kwargs": [{}]}
    wish["instruction_id_list"] = ["punctuation:no_comma"]
    code = {"id": "c1", "question": "def two():\n", "answers": ["    return 1 + 1\n"]}
    rows: dict[str, Any] = {"hotpotqa": question, "gsm8k": sum_, "ifeval": wish, "humaneval": code}
    for name, row in rows.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / f"{name}.jsonl").write_text(json.dumps(row))
    return tmp_path / "data"


def test_recall_is_measured_reported_and_not_measured_twice(
    kvloom: Kvloom, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    args = ("recall", "hotpotqa", "--out", "run", "-m", tiny_model, "--data", data, "--keep", "0.3")
    some = ("-c", "snapkv:window=8", "-c", "random:last=8", "--max-new-tokens", "3")
    done = kvloom.ok(*args, *some)
    assert done.sentence == "kvloom: 4 results; written: run/report.html"
    assert done.stdout == (tmp_path / "run" / "report.md").read_text()
    for way in ("unseen", "seen"):
        assert f"## hotpotqa, question {way}, 1 samples" in done.stdout
    assert "| F1 | exact | contains |" in done.stdout
    again = kvloom.ok(*args, *some, "--baseline", "snapkv:window=8", "--json").json
    assert again == {"out": "run", "results": 4, "skipped": 0, "report": "run/report.html"}
    assert "the baseline" in (tmp_path / "run" / "report.md").read_text()
    assert "keeps [0.3] there, [0.3, 0.6] now" in kvloom.refused(*args, *some, "--keep", "0.6")
    sentence = kvloom.refused("recall", "hotpotqa", "--out", "no", *args[4:], "--max-context", "9")
    assert sentence.startswith("none of 1 samples fits the model's context or --max-context")


def test_solve_is_measured_reported_and_not_measured_twice(
    kvloom: Kvloom, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    args = ("solve", "gsm8k", "ifeval", "humaneval", "--out", "run", "-m", tiny_model, "--data", data)
    some = ("-d", "rpc", "-d", "random", "--every", "6", "--recent", "2", "--max-new-tokens", "9")
    done = kvloom.ok(*args, *some)
    assert done.sentence == "kvloom: 9 results; written: run/report.html"
    assert done.stdout == (tmp_path / "run" / "report.md").read_text()
    assert "Every 6 generated tokens rows are dropped, the last 2 stay" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    looks = {(line["benchmark"], line["method"]): line for line in lines}
    assert looks["gsm8k", "rpc"]["reference"]["compressions"] > 0
    assert "reference" not in looks["ifeval", "rpc"]
    assert "generated" not in looks["humaneval", "rpc"]
    again = kvloom.ok(*args, *some, "--json").json
    assert again == {"out": "run", "results": 9, "skipped": 0, "report": "run/report.html"}
    assert "recent 2 there, 3 now" in kvloom.refused(*args, *some, "--recent", "3")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["recall", "hotpotqo"], "unknown benchmark 'hotpotqo'; did you mean 'hotpotqa'?"),
        (["recall", "hotpotqa", "-q", "known"], "unknown way to ask 'known'; there are: seen, unseen"),
        (["recall", "hotpotqa", "-c", "rpc"], "rpc compresses answers while they grow"),
        (
            ["recall", "hotpotqa", "-c", "knorm", "--baseline", "random"],
            "the baseline 'random' is none of the methods: knorm",
        ),
        (["recall", "hotpotqa", "--keep", "2"], "infokv: keep is the share of tokens to keep"),
        (["solve", "gsm9k"], "unknown task 'gsm9k'; did you mean 'gsm8k'?"),
        (["solve", "gsm8k", "-d", "snapkv"], "compressor 'snapkv' has no option 'every'"),
        (["solve", "gsm8k", "-c", "rpc"], "rpc compresses answers while they grow, not prompts"),
        (["solve", "gsm8k", "-d", "rpc:keep=0.5"], "'rpc:keep=0.5': keep is given with the method and for a"),
        (["solve", "gsm8k", "--every", "0"], "invalid value for '--every'"),
    ],
)
def test_bad_options_are_found_before_the_model(
    kvloom: Kvloom, data: Path, args: list[str], sentence: str
) -> None:
    refused = kvloom.refused(*args, "--out", "run", "-m", "./no-model", "--data", data)
    assert refused.startswith(sentence)
