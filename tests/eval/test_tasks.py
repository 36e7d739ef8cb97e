"""Sets of tasks: from the data folder, and from a hub that is a function here."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvloom.errors import EvalError, MethodError
from kvloom.eval.task import last_letter, last_number, plain_number, read_task_sets, take_tasks, task_sets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvloom.eval.task import Task


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = {
        "gsm8k/gsm8k.jsonl": {
            "id": "g1",
            "question": "How much are 2 and 3?",
            "answers": ["5"],
            "worked_answer": "2+3=<<2+3=5>>5",
        },
        "humaneval/humaneval.jsonl": {
            "id": "h1",
            "question": "def two():\n",
            "answers": ["    return 2\n"],
            "test": "raise SystemExit",
        },
        "ifeval/ifeval.jsonl": {
            "id": "i1",
            "question": "Say it.",
            "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
            "kwargs": [{}, {"keywords": ["it"], "num_words": None}],
        },
    }
    for file, row in rows.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(json.dumps(row) + "\n\n")
    return tmp_path


def only(name: str, data: Path | None = None) -> Task:
    (found,) = take_tasks(task_sets.build(name), data)
    return found


def test_tasks_of_the_data_folder(data: Path) -> None:
    worked = only("gsm8k", data)
    assert worked.prompt.startswith("How much are 2 and 3?\n\nSolve it")
    assert (worked.reference, worked.answer) == ("2+3=5\nThe answer is 5.", "5")
    code = only("humaneval", data)
    assert (code.prompt, code.reference, code.is_chat) == ("def two():\n", "    return 2\n", False)
    assert task_sets["humaneval"].judge == "none", "no program is generated, so none can be run"
    wishes = only("ifeval", data)
    assert wishes.instructions == (("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["it"]}))
    assert wishes.reference == ""


def test_data_that_is_not_there_or_broken(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_DATA", raising=False)
    with pytest.raises(EvalError, match="gsm8k: name a data folder with --data or KVLOOM_DATA, with gsm8k/"):
        only("gsm8k")
    file = data / "gsm8k" / "gsm8k.jsonl"
    for text, message in (
        ('{"id": "g"}', "gsm8k.jsonl:1: has no question, answers, worked_answer"),
        ("no json", "gsm8k.jsonl:1: not a JSON object"),
        ("7", "gsm8k.jsonl:1: not a JSON object"),
        ("", "gsm8k has no tasks"),
    ):
        file.write_text(text)
        with pytest.raises(EvalError, match=message):
            only("gsm8k", data)
    file.write_bytes(b"\xff")
    with pytest.raises(EvalError, match="is not UTF-8 text"):
        only("gsm8k", data)
    file.unlink()
    with pytest.raises(EvalError, match="cannot be read: No such file"):
        only("gsm8k", data)
    row = json.loads((data / "ifeval" / "ifeval.jsonl").read_text())
    (data / "ifeval" / "ifeval.jsonl").write_text(json.dumps(row | {"kwargs": [{}]}))
    with pytest.raises(EvalError, match="ifeval: i1 has 2 instructions and 1 kwargs"):
        only("ifeval", data)


def test_sets_as_they_are_written() -> None:
    (found,) = read_task_sets(["longreason:length=32k"])
    assert repr(found) == "LongReason(length='32k')"
    with pytest.raises(MethodError, match="unknown task 'gsm8'; did you mean 'gsm8k'"):
        read_task_sets(["gsm8"])
    with pytest.raises(MethodError, match="a task set is named twice: longreason, longreason"):
        read_task_sets(["longreason:length=8k", "longreason:length=16k"])
    with pytest.raises(MethodError, match='option length: "9k" will not do'):
        read_task_sets(["longreason:length=9k"])


# --- the hub

ROWS: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], dict[str, Any]]]] = {
    "ifeval": (
        {
            "key": 1001,
            "prompt": "Say it.",
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": 3, "relation": "at least", "language": None}],
        },
        (("google/IFEval",), {"split": "train"}),
    ),
    "aime": (
        {"id": 60, "problem": "How many are there?", "answer": "025"},
        (("HuggingFaceH4/aime_2024",), {"split": "train"}),
    ),
    "longreason": (
        {"example_idx": 7, "prompt": "A long text. Which? A: one, B: two", "answer": "b "},
        (("lz1bytedance/LongReason",), {"split": "8k"}),
    ),
    "livecodebench": (
        {"question_id": "q1", "question_content": "Add them.", "starter_code": "def add():"},
        (
            ("json",),
            {
                "data_files": {"test": "hf://datasets/livecodebench/code_generation_lite/test.jsonl"},
                "split": "test",
            },
        ),
    ),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Puts a `datasets` in place whose load_dataset gives `rows`, or raises; returns the calls."""
    monkeypatch.delenv("KVLOOM_DATA", raising=False)

    def place(rows: Any) -> list[Any]:
        calls: list[Any] = []

        def load_dataset(*path: str, **options: Any) -> Any:
            calls.append((path, options))
            if isinstance(rows, Exception):
                raise rows
            return rows

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return calls

    return place


@pytest.mark.parametrize("name", ROWS)
def test_tasks_of_the_hub(hub: Callable[[Any], list[Any]], name: str) -> None:
    row, call = ROWS[name]
    calls = hub([row])
    found = only(name)
    assert calls == [call]
    if name == "ifeval":
        assert found.id == "1001"
        assert found.instructions == (
            ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}),
        )
    if name == "aime":
        assert (found.id, found.answer) == ("60", "25")
        assert found.prompt.startswith("How many are there?\n\n")
    if name == "longreason":
        assert (found.id, found.answer, found.prompt) == ("7", "B", row["prompt"])
    if name == "livecodebench":
        assert "```python\ndef add():\n```" in found.prompt
        assert task_sets[name].judge == "text", "what is generated is not run"
        hub([row | {"starter_code": ""}])
        assert only(name).prompt.endswith("Read from standard input and write to standard output.")


@pytest.mark.parametrize("name", ROWS)
def test_a_hub_that_does_not_answer(
    hub: Callable[[Any], list[Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(ConnectionError("no\nroute"))
    with pytest.raises(EvalError, match=rf"{name}: .* \(ConnectionError: no route\); try again"):
        only(name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EvalError, match=rf"^{name}: .*pip install 'kvloom\[eval\]' to read"):
        only(name)


# --- answers


def test_the_last_number_and_the_last_letter() -> None:
    assert last_number("It is 7, no: $1,234.50.") == "1234.5"
    assert last_number("-3 or .5") == "0.5"
    assert last_number("12 apples cost 3") == "3"
    assert last_number("none") is None
    assert [plain_number(text) for text in ("077", "1,000", "5.0", "x")] == ["77", "1000", "5", "x"]
    assert last_letter("Answer: **D**") == "D"
    assert last_letter("The answer is A. I thought of (C).") == "A"
    assert last_letter("between B and C") == "C"
    assert last_letter("A dog is I'd say nothing") is None
