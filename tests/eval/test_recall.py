"""Questions over compressed prompts: every number against one long forward, and the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.compressors import compress, compressors
from kvloom.errors import EvalError, MethodError
from kvloom.eval import recall
from kvloom.eval.benchmark import Benchmark, Sample
from kvloom.eval.metrics import agreement, kl_per_token, nll_per_token, token_f1
from kvloom.eval.recall_report import report
from kvloom.observe import Observer
from kvloom.prompt import Document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvloom.loom import Loom

METHODS = ["infokv:window=8", "infokv:window=8,k=16", "snapkv:window=8,kernel=9", "random:last=8"]


@dataclass(frozen=True, kw_only=True)
class Looms(Benchmark):
    """Two questions over the same documents."""

    name = "looms"  # type: ignore[misc]
    version = "1"
    is_multihop = False
    description = licence = "-"

    def samples(self, data: Path | None) -> Iterator[Sample]:
        documents = tuple(map(Document, DOCUMENTS))
        yield Sample("a", QUESTION, ("A weaver", "the weaver"), documents, kind="who")
        yield Sample("b", "What was worth more than silver?", ("Cloth",), documents)


def measured(loom: Loom, folder: Path, **asked: Any) -> list[dict[str, Any]]:
    asked = {
        "limit": None,
        "questions": ["unseen", "seen"],
        "methods": METHODS,
        "keeps": [0.3],
        "max_new_tokens": 4,
        "max_context": None,
    } | asked
    samples = [list(Looms().samples(None))]
    recipe = recall.make_recipe(loom, "tiny", [Looms()], samples, **asked)
    recall.run(loom, [Looms()], samples, recipe, folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def loom() -> Loom:
    return loom_of("llama")


def test_every_line_is_what_the_steps_one_by_one_give(loom: Loom, tmp_path: Path) -> None:
    lines = measured(loom, tmp_path)
    assert len(lines) == 2 * 2 * 4
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    gold = torch.tensor(loom.tokenizer.encode("A weaver"))
    num_context, num_question = len(prompt.context_ids), len(prompt.question_ids)
    whole = torch.cat([prompt.token_ids, gold])
    with torch.no_grad():
        reference = loom.model(input_ids=whole[None]).logits[0, len(prompt.token_ids) - 1 : -1]
    for line in lines:
        if line["sample"] != "a":
            continue
        held_back = num_question if line["question"] == "unseen" else 1
        method = compressors.build(line["name"], line["options"])
        cache = loom.decoder.new_cache(0)
        observer = Observer(loom.decoder, cache, method.records)
        observer.run(prompt.token_ids[:-held_back])
        compress(method, cache, observer, protect=[range(num_context, cache.num_rows)])
        logits = loom.decoder.follow(whole[-held_back - len(gold) : -1], cache)[-len(gold) :]
        kl = kl_per_token(reference, logits)
        assert line["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
        assert line["first_kl"] == pytest.approx(float(kl[0]), rel=1e-3)
        assert line["kl"] > 1e-3
        assert line["nll"] == pytest.approx(float(nll_per_token(logits, gold).mean()), rel=1e-4)
        assert line["full_nll"] == pytest.approx(float(nll_per_token(reference, gold).mean()), rel=1e-4)
        assert line["agreement"] == pytest.approx(agreement(reference, logits))
        num_before = num_context + num_question - held_back
        assert line["kept"] == [int(0.3 * num_before) + held_back] * 3
        assert line["bytes"] == line["full_bytes"] // (num_context + num_question) * line["kept"][0]
        assert line["f1"] == token_f1(line["text"], ("A weaver", "the weaver"))
        full = loom.generate(prompt.token_ids, max_new_tokens=4)
        assert line["full_text"] == full.text.strip()


def test_a_seen_question_is_protected_and_an_unseen_one_not_there(loom: Loom, tmp_path: Path) -> None:
    """keydiff looks at no query: at a share that the question alone takes up, seen keeps next to nothing of
    the context.
    """
    unseen, seen = measured(loom, tmp_path, methods=["keydiff"], keeps=[0.1])[:2]
    assert (unseen["question"], seen["question"]) == ("unseen", "seen")
    num_question, num_context = seen["question_tokens"], seen["context_tokens"]
    assert num_question > 0.1 * (num_context + num_question) + 1
    assert seen["kept"] == [num_question + 1] * 3
    assert seen["note"].startswith(f"kept {num_question} tokens instead of ")
    assert unseen["kept"] == [int(0.1 * num_context) + num_question] * 3


def test_keeping_everything_is_the_uncompressed_cache(loom: Loom, tmp_path: Path) -> None:
    for line in measured(loom, tmp_path, methods=["knorm", "infokv:window=8"], keeps=[1.0]):
        assert (line["kl"], line["first_kl"], line["agreement"]) == (0, 0, 1)
        assert (line["nll"], line["text"], line["bytes"]) == (
            line["full_nll"],
            line["full_text"],
            line["full_bytes"],
        )


def test_a_run_goes_on_where_it_stopped_and_skips_what_does_not_fit(loom: Loom, tmp_path: Path) -> None:
    whole = measured(loom, tmp_path / "whole", methods=METHODS[2:])
    part = tmp_path / "part"
    part.mkdir()
    (part / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    kept = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()[:3]
    (part / "results.jsonl").write_text("\n".join(kept) + "\n")
    resumed = measured(loom, part, methods=METHODS[2:])
    assert [line["kl"] for line in resumed] == [line["kl"] for line in whole]
    with pytest.raises(EvalError, match="another recipe"):
        measured(loom, part, methods=METHODS[2:], keeps=[0.4])
    with pytest.raises(EvalError, match="none of 2 samples fits"):
        measured(loom, tmp_path / "none", max_context=20)
    skipped = (tmp_path / "none" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in skipped] == ["a", "b"]


def test_ways_and_baselines_that_are_not_there() -> None:
    with pytest.raises(MethodError, match="unknown way to ask 'sen'; did you mean 'seen'"):
        recall.check_ways(["sen"])
    with pytest.raises(MethodError, match="named twice: seen, seen"):
        recall.check_ways(["seen", "seen"])
    with pytest.raises(MethodError, match="the baseline 'knorm' is none of the methods: random"):
        recall.check_baseline("knorm", ["random"])


def test_the_report_tells_the_ways_apart_and_pairs_with_a_baseline(loom: Loom, tmp_path: Path) -> None:
    lines = measured(loom, tmp_path, methods=["snapkv:window=8", "keydiff"], keeps=[0.3])
    page = report(tmp_path, "keydiff")
    text = (tmp_path / "report.md").read_text()
    assert page.read_text().startswith("<!doctype html>")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    for way in ("unseen", "seen"):
        assert f"looms, question {way}, 2 samples" in text
    mains = [row for row in rows if row[:2] == ["keydiff", "0.3"]]
    pairs = [row for row in rows if row[:3] == ["snapkv:window=8", "keydiff", "the baseline"]]
    assert len(mains) == 2
    assert [row[3] for row in pairs] == ["KL", "NLL"] * 2
    for way, row, pair in zip(("unseen", "seen"), mains, pairs[::2], strict=True):
        mine = {
            method: fmean(x["kl"] for x in lines if (x["question"], x["method"]) == (way, method))
            for method in ("snapkv:window=8", "keydiff")
        }
        assert row[6].partition(" [")[0] == f"{1000 * mine['keydiff']:.4g}"
        difference = 1000 * (mine["snapkv:window=8"] - mine["keydiff"])
        assert pair[6].partition(" [")[0] == f"{difference:.4g}".replace("-", "\N{MINUS SIGN}")
        assert pair[5] == "equal"
    assert "against keydiff (the baseline), equal bytes: " in text
    with pytest.raises(MethodError, match="the baseline 'random' is none of the methods"):
        report(tmp_path, "random")
    with pytest.raises(EvalError, match=r"has no run\.json"):
        report(tmp_path / "nowhere")
