from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import DOCUMENTS, FLOAT32, QUESTION, difference, loom_of

from kvloom.compressors.knorm import Knorm
from kvloom.errors import EvalError, MethodError
from kvloom.eval.benchmark import Benchmark, Sample
from kvloom.eval.metrics import kl_per_token
from kvloom.eval.runner import Method, Recipe, Run, look, make_recipe, read_lines, run
from kvloom.prompt import Document
from kvloom.selectors import InfoFlow, NoRecompute
from kvloom.trace import from_ranges

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.loom import Loom

SAMPLES = [
    Sample("one", QUESTION, ("A weaver from Lyon",), tuple(map(Document, DOCUMENTS)), kind="2 hops"),
    Sample("two", "What colour was the cloth?", ("blue", "Blue."), tuple(map(Document, DOCUMENTS[1:]))),
    Sample("long", "Too long?", ("yes",), (Document("word " * 1000),)),
]


class Small(Benchmark):
    name = "small"
    version = "1"
    is_multihop = True
    description = licence = "none"

    def samples(self, data: Path | None) -> Any:
        return iter(SAMPLES)


METHODS = [Method.parse(text) for text in ("full", "none", "infoflow:ratio=0.3", "infoflow:ratio=1")]


def recipe_of(loom: Loom, methods: list[Method] = METHODS, **options: Any) -> Recipe:
    return make_recipe(loom, "tiny", [Small()], [SAMPLES], methods, **options)


def go(loom: Loom, folder: Path, methods: list[Method] = METHODS, **options: Any) -> list[dict[str, Any]]:
    recipe = recipe_of(loom, methods, **options)
    run(loom, [Small()], [SAMPLES], methods, Run(folder, recipe), recipe)
    return read_lines(folder / "results.jsonl")


def test_methods_by_text() -> None:
    assert Method.parse("none").selector == NoRecompute()
    parsed = Method.parse("infoflow:ratio=0.05,layers=1,2,reorder=chunks")
    assert parsed.selector == InfoFlow(ratio=0.05, layers="1,2")
    assert parsed.reorder == "chunks"
    assert parsed.recipe.endswith("reorder=chunks")
    for text, message in {
        "infoflw": "did you mean 'infoflow'",
        "infoflow:ratio": "not of the form OPTION=VALUE",
        "infoflow:reorder=maybe": "reorder is true, false or chunks",
        "infoflow:rato=1": "did you mean 'ratio'",
        "none@snapvk": "did you mean 'snapkv'",
        "full@snapkv": "full takes no chunk from the store",
    }.items():
        with pytest.raises(MethodError, match=message):
            Method.parse(text)


def test_a_method_over_compressed_chunks_is_measured_beside_the_others(tmp_path: Path) -> None:
    written = ("none", "none@random:keep=1", "none@knorm:keep=0.5", "infoflow:ratio=1@knorm:keep=0.5")
    parsed = [Method.parse(text) for text in written]
    assert parsed[3].selector == InfoFlow(ratio=1.0)
    assert parsed[3].recipe == f"{InfoFlow(ratio=1.0)!r} @ {Knorm(keep=0.5)!r}"
    loom = loom_of("llama")
    for sample in zip(*[iter(go(loom, tmp_path, parsed))] * len(written), strict=True):
        whole, same, half, repaired = sample
        assert same["kl"] == pytest.approx(whole["kl"], abs=1e-6)
        assert same["trace"]["kv_bytes"] == whole["trace"]["kv_bytes"]
        assert abs(half["kl"] - whole["kl"]) > 1e-4
        assert half["trace"]["kv_bytes"] < whole["trace"]["kv_bytes"]
        assert repaired["trace"]["kv_bytes"] == half["trace"]["kv_bytes"]
        assert repaired["trace"]["recomputed_rows"] > 0
    assert loom.chunk_compressor is None
    named = [
        replace(
            sample,
            documents=tuple(Document(d.text, id=f"d{place}") for place, d in enumerate(sample.documents)),
        )
        for sample in SAMPLES
    ]
    for result in look(loom, Small(), named[0], parsed, recipe_of(loom, parsed)):
        assert result.trace["prefilled_tokens"] == 0, "all chunks are there before the clock starts"


def test_every_method_is_measured_against_full_prefill_over_the_gold_answer(tmp_path: Path) -> None:
    loom = loom_of("llama")
    lines = go(loom, tmp_path)
    assert [(line["sample"], line["method"]) for line in lines] == [
        (sample, method.label) for sample in ("one", "two") for method in METHODS
    ]
    by = {(line["sample"], line["method"]): line for line in lines}
    full, none, some, everything = (by["one", method.label] for method in METHODS)
    assert (full["kl"], full["agreement"]) == (0, 1)
    assert everything["kl"] < 1e-9 < none["kl"]
    assert everything["nll"] == pytest.approx(full["nll"], rel=1e-4)
    assert full["num_gold"] == len(b"A weaver from Lyon")
    assert full["trace"]["token_layers"] == 3 * (
        full["trace"]["context_tokens"] + full["trace"]["question_tokens"]
    )
    assert none["trace"]["prefilled_tokens"] == 0, "chunks are in the store before any method is timed"
    assert some["recipe"] == repr(InfoFlow(ratio=0.3))
    assert some["kind"] == "2 hops"
    # the oracle: one full forward over prompt and gold answer by the model's own code
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    gold = torch.tensor(list(b"A weaver from Lyon"))
    with torch.no_grad():
        logits = loom.model(input_ids=torch.cat([prompt.token_ids, gold])[None]).logits[0]
    predicting = logits[prompt.num_tokens - 1 : -1].double().log_softmax(-1)
    expected = -predicting.gather(1, gold[:, None]).mean()
    assert full["nll"] == pytest.approx(float(expected), rel=1e-4)
    cache, first = loom.prepare(prompt, NoRecompute())
    stepwise = [first]
    for token in gold[:-1]:
        place = torch.tensor([cache.next_position])
        stepwise.append(loom.decoder.forward(token[None], place, cache, num_new=1))
    kl = kl_per_token(predicting.float(), torch.stack(stepwise))
    assert none["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert none["first_kl"] == pytest.approx(float(kl[0]), rel=1e-3)


def test_a_sample_too_long_is_skipped_counted_and_not_tried_again(tmp_path: Path) -> None:
    go(loom_of("llama"), tmp_path)
    skipped = read_lines(tmp_path / "skipped.jsonl")
    assert [(line["sample"], line["reason"][:30]) for line in skipped] == [
        ("long", "prompt has 5,030 tokens, model")
    ]
    go(loom_of("llama"), tmp_path)
    assert len(read_lines(tmp_path / "skipped.jsonl")) == 1


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loom = loom_of("llama")
    whole = go(loom, tmp_path / "whole")
    lines = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    part = tmp_path / "part"
    part.mkdir()
    (part / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    (part / "results.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])
    looked: list[list[str]] = []

    def counting(loom: Loom, benchmark: Benchmark, sample: Sample, methods: list[Method], *rest: Any) -> Any:
        looked.append([sample.id, *(method.label for method in methods)])
        return look(loom, benchmark, sample, methods, *rest)

    monkeypatch.setattr("kvloom.eval.runner.look", counting)
    resumed = go(loom, part)
    assert looked[0] == ["one", "infoflow:ratio=1"]
    assert [[line[key] for key in ("sample", "method", "kl")] for line in resumed] == [
        [line[key] for key in ("sample", "method", "kl")] for line in whole
    ]


def test_a_folder_of_another_recipe_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    loom = loom_of("llama")
    Run(tmp_path, recipe_of(loom))
    Run(tmp_path, recipe_of(loom))
    with pytest.raises(EvalError, match="max_new_tokens 0 there, 5 now"):
        Run(tmp_path, recipe_of(loom, max_new_tokens=5))
    with pytest.raises(EvalError, match=r"methods .* there"):
        Run(tmp_path, recipe_of(loom, METHODS[:2]))
    with pytest.raises(MethodError, match="given twice"):
        recipe_of(loom, [METHODS[0], METHODS[0]])
    with pytest.raises(MethodError, match="chunks must be passages or fixed"):
        recipe_of(loom, chunks="words")
    assert json.loads((tmp_path / "run.json").read_text())["fingerprint"] == loom.decoder.fingerprint


def test_greedy_answers_are_those_of_the_loom(tmp_path: Path) -> None:
    loom = loom_of("llama")
    lines = go(loom, tmp_path, max_new_tokens=6)
    by = {(line["sample"], line["method"]): line for line in lines}
    for method in METHODS:
        answer = loom.answer(QUESTION, DOCUMENTS, selector=method.selector, max_new_tokens=6)
        assert by["one", method.label]["text"] == answer.text.strip()
        assert by["one", method.label]["f1"] == 0


def test_fixed_chunks_cut_the_joined_passages(tmp_path: Path) -> None:
    from kvloom.prompt import PromptFormat

    loom = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=64))
    recipe = recipe_of(loom, chunks="fixed")
    result = next(look(loom, Small(), SAMPLES[0], [Method.parse("none")], recipe))
    assert result.trace["context_tokens"] > len(loom.prompt(QUESTION, DOCUMENTS).context_ids)
    assert result.kl > 0


def test_samples_of_a_longer_context_than_asked_for_are_skipped_and_counted(tmp_path: Path) -> None:
    loom = loom_of("llama")
    longest = len(loom.prompt(QUESTION, DOCUMENTS).context_ids)
    lines = go(loom, tmp_path, max_context=longest - 1)
    assert {line["sample"] for line in lines} == {"two"}
    reasons = {line["sample"]: line["reason"] for line in read_lines(tmp_path / "skipped.jsonl")}
    assert reasons["one"] == (
        f"context has {longest:,} tokens, the run takes {longest - 1:,} (--max-context)"
    )
    with pytest.raises(EvalError, match=f"max_context {longest - 1} there, null now"):
        Run(tmp_path, recipe_of(loom))


def test_results_say_which_rows_were_recomputed_and_how_near_the_question_they_are(tmp_path: Path) -> None:
    loom = loom_of("llama")
    by = {(line["sample"], line["method"]): line for line in go(loom, tmp_path)}
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    rows = loom.select(loom.splice(prompt), prompt, InfoFlow(ratio=0.3)).tolist()
    line = by["one", "infoflow:ratio=0.3"]
    assert from_ranges(line["trace"]["rows"]) == rows
    assert by["one", "full"]["trace"]["rows"] == f"0-{len(prompt.context_ids) - 1}"
    assert (by["one", "none"]["trace"]["rows"], by["one", "none"]["rope_similarity"]) == ("", None)
    # the oracle: the cosine between a vector rotated to one place and to another, over its pairs of channels
    similarities = []
    for row in rows:
        for asked in prompt.question_span:
            rotation = loom.decoder.rotation(len(prompt.context_ids) + asked - row)
            similarities.append(float(rotation.diagonal().mean()))
    assert line["rope_similarity"] == pytest.approx(sum(similarities) / len(similarities), rel=1e-4)


def test_no_sample_that_fits_is_an_error(tmp_path: Path) -> None:
    loom = loom_of("llama")
    recipe = make_recipe(loom, "tiny", [Small()], [SAMPLES[2:]], METHODS)
    with pytest.raises(EvalError, match="none of 1 samples fits"):
        run(loom, [Small()], [SAMPLES[2:]], METHODS, Run(tmp_path, recipe), recipe)


def test_following_tokens_are_those_of_a_whole_forward() -> None:
    loom = loom_of("qwen3")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    cache, _ = loom.full_prefill(prompt)
    more = torch.tensor([65, 66, 67])
    with torch.no_grad():
        expected = loom.model(input_ids=torch.cat([prompt.token_ids, more])[None]).logits[0, -3:]
    assert difference(loom.decoder.follow(more, cache), expected) < FLOAT32
