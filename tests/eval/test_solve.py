"""Answers compressed while they grow: every number against a conversation stepped by hand, and the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import loom_of

from kvloom.compressors import as_compressor
from kvloom.conversation import Conversation
from kvloom.errors import EvalError, MethodError
from kvloom.eval import solve
from kvloom.eval.metrics import kl_per_token, nll_per_token
from kvloom.eval.solve_report import report
from kvloom.eval.task import Task, TaskSet, take_tasks
from kvloom.turns import turn_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvloom.loom import Loom

INFO = "infokv:alpha=0.1"
METHODS = ["infokv:k=16", "rpc", "random"]
ROW_BYTES = 3 * 2 * 2 * 16 * 4


@dataclass(frozen=True, kw_only=True)
class Sums(TaskSet):
    """One task whose answer is longer than the interval, one whose answer is not."""

    name = "sums"  # type: ignore[misc]
    judge = "number"
    description = licence = "-"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        yield Task(
            id="long", prompt="How much is 2 and 2?", answer="4", reference="2 and 2 are four. It is 4."
        )
        yield Task(id="short", prompt="And 3?", answer="5", reference="It is 5.")


@dataclass(frozen=True, kw_only=True)
class Wishes(TaskSet):
    """Instructions, of which one cannot be checked."""

    name = "wishes"  # type: ignore[misc]
    judge = "instructions"
    description = licence = "-"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        wish = ("punctuation:no_comma", {})
        yield Task(id="known", prompt="Say it without commas.", instructions=(wish,))
        yield Task(id="unknown", prompt="Rhyme.", instructions=(wish, ("keywords:rhymes", {})))


ASKED = {
    "limit": None,
    "prompt_method": None,
    "decode_methods": METHODS,
    "keeps": [0.25],
    "every": 8,
    "recent": 2,
    "max_new_tokens": 20,
}


def measured(loom: Loom, folder: Path, *sets: TaskSet, **asked: Any) -> list[dict[str, Any]]:
    tasks = [list(task_set.tasks(None)) for task_set in sets]
    recipe = solve.make_recipe(loom, "tiny", sets, tasks, **ASKED | asked)
    solve.run(loom, sets, tasks, recipe, folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def loom() -> Loom:
    return loom_of("llama")


def test_every_line_is_what_a_conversation_stepped_by_hand_gives(loom: Loom, tmp_path: Path) -> None:
    lines = measured(loom, tmp_path, Sums())
    assert [(line["sample"], line["method"], line["keep"]) for line in lines] == [
        (task, method, keep)
        for task in ("long", "short")
        for method, keep in [("full", 1.0), *((method, 0.25) for method in METHODS)]
    ]
    for task in Sums().tasks(None):
        ids = turn_ids(loom.tokenizer, loom.prompt_format, task.prompt, is_first=True)
        answer = torch.tensor(loom.tokenizer.encode(task.reference))
        with torch.no_grad():
            whole = loom.model(input_ids=torch.cat([ids, answer])[None]).logits[0, len(ids) - 1 : -1]
        for line in lines:
            if line["sample"] != task.id:
                continue
            look, method = line["reference"], None
            if line["method"] != "full":
                options = {"keep": 0.25, "every": 8, "recent": 2}
                options |= {"k": 16} if line["name"] == "infokv" else {}
                method = as_compressor(line["name"], options, phase="decode")
                assert line["recipe"] == repr(method)
            talk = Conversation(loom.decoder, decode_compressor=method)  # type: ignore[arg-type]
            logits = [talk.prefill(ids), *(talk.step(token) for token in answer[:-1].tolist())]
            kl = kl_per_token(whole, torch.stack(logits))
            assert look["kl"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-9)
            nll = float(nll_per_token(torch.stack(logits), answer).mean())
            assert look["nll"] == pytest.approx(nll, rel=1e-5)
            full_nll = float(nll_per_token(whole, answer).mean())
            assert look["full_nll"] == pytest.approx(full_nll, rel=1e-4)
            assert look["bytes"] == talk.cache.num_bytes
            assert look["full_bytes"] == (len(ids) + len(answer) - 1) * ROW_BYTES
            assert look["tokens"] == len(answer)


def test_how_often_rows_were_dropped(loom: Loom, tmp_path: Path) -> None:
    """26 tokens, of which 25 are run: before the 9th, the 17th and the 25th. 8 tokens: never."""
    lines = {(line["sample"], line["method"]): line for line in measured(loom, tmp_path, Sums())}
    for method in METHODS:
        long, short = lines["long", method], lines["short", method]
        assert len("2 and 2 are four. It is 4.") == long["reference"]["tokens"] == 26
        assert (long["reference"]["compressions"], short["reference"]["compressions"]) == (3, 0)
        prompt = long["prompt_tokens"]
        assert long["reference"]["kept"] == [prompt + 6 + 2 + 1] * 3
        assert long["reference"]["kl"] > 1e-4
        assert short["reference"]["kl"] < 1e-9
        assert long["generated"]["compressions"] == 2, "19 of 20 tokens are run"
        assert long["generated"]["tokens"] == 20
    full = lines["long", "full"]
    assert full["reference"]["kl"] < 1e-9
    assert full["reference"]["compressions"] == full["generated"]["compressions"] == 0
    assert full["reference"]["bytes"] == full["reference"]["full_bytes"]


def test_an_interval_within_the_tail_drops_nothing_and_counts_as_none(loom: Loom, tmp_path: Path) -> None:
    for line in measured(loom, tmp_path, Sums(), every=4, recent=40, max_new_tokens=0):
        assert line["reference"]["compressions"] == 0
        assert line["reference"]["kl"] < 1e-9
        assert "generated" not in line


def test_the_prompt_is_compressed_too_and_alone(loom: Loom, tmp_path: Path) -> None:
    lines = measured(loom, tmp_path, Sums(), prompt_method="keydiff:keep=0.5", decode_methods=["rpc"])
    full, alone, both = lines[:3]
    assert [line["method"] for line in (full, alone, both)] == ["full", "keydiff:keep=0.5", "rpc"]
    prompt = full["prompt_tokens"]
    assert alone["reference"]["kept"] == [prompt // 2 + 25] * 3
    assert both["reference"]["kept"] == [prompt // 2 + 6 + 2 + 1] * 3
    assert (alone["reference"]["compressions"], alone["generated"]["compressions"]) == (0, 0)
    assert (both["reference"]["compressions"], both["generated"]["compressions"]) == (3, 2)


def test_answers_are_judged() -> None:
    task = Task(id="t", prompt="p", answer="1200", instructions=(("punctuation:no_comma", {}), ("x:y", {})))
    assert solve.judged(task, "number", "First 7. So it costs $1,200.00.") == {"correct": 1}
    assert solve.judged(task, "number", "1200 less 1 is 1199") == {"correct": 0}
    assert solve.judged(task, "number", "no idea") == {"correct": 0}
    assert solve.judged(task, "instructions", "a, b") == {
        "instructions": [["punctuation:no_comma", False], ["x:y", None]]
    }
    assert solve.judged(task, "text", "print(1)") == {}
    letter = Task(id="t", prompt="p", answer="C")
    assert solve.judged(letter, "letter", "(A) is wrong. The answer is (C), not B.") == {"correct": 1}
    assert solve.judged(letter, "letter", "It is A or (B)") == {"correct": 0}


def test_arms_and_what_they_refuse() -> None:
    labels = [(arm.label, arm.keep) for arm in solve.arms(["rpc"], [0.5, 0.25], 64, 16)]
    assert labels == [("full", 1.0), ("rpc", 0.5), ("rpc", 0.25)]
    (decode,) = [arm.decode for arm in solve.arms(["r-kv"], [0.5], 64, 16) if arm.decode]
    assert (decode.every, decode.recent, decode.keep) == (64, 16, 0.5)
    for methods, message in (
        (["snapkv"], "compressor 'snapkv' has no option 'every'"),
        (["rpc:every=32"], "'rpc:every=32': every is given with the method and for all"),
        (["rpc", "rpc"], "a method is given twice: rpc, rpc"),
    ):
        with pytest.raises(MethodError, match=message):
            solve.arms(methods, [0.25], 64, 16)
    with pytest.raises(MethodError, match="rpc compresses answers while they grow"):
        solve.arms(["rpc"], [0.25], 64, 16, prompt_method="rpc")


def test_a_run_goes_on_where_it_stopped_and_skips_what_does_not_fit(loom: Loom, tmp_path: Path) -> None:
    whole = measured(loom, tmp_path / "whole", Sums())
    part = tmp_path / "part"
    part.mkdir()
    (part / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    kept = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()[:5]
    (part / "results.jsonl").write_text("\n".join(kept) + "\n")
    resumed = measured(loom, part, Sums())
    assert [line["reference"]["kl"] for line in resumed] == [line["reference"]["kl"] for line in whole]
    with pytest.raises(EvalError, match="every 8 there, 9 now"):
        measured(loom, part, Sums(), every=9)
    with pytest.raises(EvalError, match="none of 2 tasks fits the model's context"):
        measured(loom, tmp_path / "none", Sums(), max_new_tokens=3000)
    with pytest.raises(EvalError, match="task 't' has no prompt"):
        Task(id="t", prompt=" ")


def table_rows(text: str, *cells: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[: len(cells)] == list(cells)]


def test_the_report_says_how_often_and_pairs(loom: Loom, tmp_path: Path) -> None:
    methods = [INFO, "rpc", "random", "r-kv"]
    lines = measured(loom, tmp_path, Sums(), Wishes(), decode_methods=methods)
    path = tmp_path / "results.jsonl"
    for line in lines:  # answers by hand: infokv is right twice, the others once
        if line["benchmark"] == "sums":
            line["generated"]["correct"] = float(line["name"] == "infokv" or line["sample"] == "long")
        elif line["sample"] == "known":
            line["generated"]["instructions"][0][1] = line["method"] != "rpc"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    report(tmp_path, "r-kv")
    text = (tmp_path / "report.md").read_text()
    assert "Every 8 generated tokens rows are dropped, the last 2 stay; prompts whole" in text
    forced, greedy, *_ = table_rows(text, INFO, "0.25")
    assert forced[2:5] == ["1 of 2", "1.5", "17"]
    assert greedy[2:5] == ["2 of 2", "2.0", "20"]
    assert greedy[-1] == "100.0% [100.0%, 100.0%]"
    kl = {
        method: sum(x["reference"]["kl"] for x in lines if x["benchmark"] == "sums" and x["method"] == method)
        for method in (INFO, "rpc")
    }
    (pair,) = table_rows(text, INFO, "rpc", "its attention-only parent", "KL")
    assert pair[4:6] == ["0.25", "equal"]
    difference = f"{1000 * (kl[INFO] - kl['rpc']) / 2:.4g}".replace("-", "\N{MINUS SIGN}")
    assert pair[6].partition(" [")[0] == difference
    assert table_rows(text, "rpc", "random", "chance", "KL")
    assert table_rows(text, "rpc", "r-kv", "the baseline", "KL")
    assert not table_rows(text, "rpc", INFO)
    score = table_rows(text, INFO, "rpc", "its attention-only parent", "0.25")[0]
    assert score[-2:] == ["+50.0 [+0.0, +100.0]", "1 of 2"]
    assert table_rows(text, INFO, "full", "nothing dropped")[0][-1] == "1 of 2"
    wishes = text.partition("## wishes")[2]
    assert "Right answers" not in wishes
    assert "Unchecked over the full cache: keywords:rhymes (1)." in wishes
    (row,) = table_rows(wishes, "rpc", "0.25")
    assert row[-2].startswith("0.0%"), "of the one prompt that can be checked"
    assert table_rows(wishes, INFO, "0.25")[0][-2].startswith("100.0%")
    with pytest.raises(MethodError, match="the baseline 'knorm' is none of the methods"):
        report(tmp_path, "knorm")


def test_tasks_are_taken_once_each() -> None:
    assert [task.id for task in take_tasks(Sums(), limit=1)] == ["long"]

    class Twice(Sums):
        def tasks(self, data: Path | None) -> Iterator[Task]:
            return iter([*super().tasks(data)] * 2)

    with pytest.raises(EvalError, match="sums: the id 'long' stands twice in the data"):
        take_tasks(Twice())
