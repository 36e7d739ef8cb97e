"""What the benches measure: turns, exact prompts, clocks, and the keys that the docs name."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_models import loom_of

from kvloom.bench import decode, index, ttft
from kvloom.bench.draw import label, write_plot
from kvloom.bench.measure import fitting, in_turns, own_attention, ratio, spread
from kvloom.bench.models import Bytes, open_model
from kvloom.bench.texts import documents, prompt_of
from kvloom.errors import MethodError, ModelError

if TYPE_CHECKING:
    from kvloom.loom import Loom

DOCS = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def assert_documented(found: dict[str, Any], bench: str) -> None:
    """All keys of file and results stand in the docs, those of results in the line of their bench."""
    assert set(found) <= set(re.findall(r"`(\w+)`", DOCS.partition("## The JSON")[2]))
    line = next(line for line in DOCS.splitlines() if line.startswith(f"| {bench} | `"))
    named = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", line))  # in brackets: what is inside of one
    assert set(found["results"][0]) == {"length", "method", *named}


@pytest.fixture(scope="module")
def loom() -> Loom:
    return open_model("random:toy", chunk_tokens=1024, store="memory:")


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    seen, rounds = [], []

    def runner(name: str) -> Any:
        return lambda: seen.append(name) or len(seen)

    taken = in_turns(
        {name: runner(name) for name in "abc"}, 2, lambda number, found: rounds.append((number, dict(found)))
    )
    assert "".join(seen) == "cbaabccba"
    assert taken == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}
    assert rounds[0] == (0, {"c": 1, "b": 2, "a": 3})
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0


def test_prompts_have_exactly_the_tokens_asked_for_and_no_chunk_twice(loom: Loom) -> None:
    for num_tokens in (100, 1000, 2000):
        prompt = prompt_of(loom, num_tokens, 64)
        assert prompt.num_tokens == num_tokens
        chunks = [tuple(ids.tolist()) for ids in prompt.chunk_ids]
        assert len(set(chunks)) == len(chunks)
        assert all(0 < len(ids) < 100 for ids in chunks)
    assert len(documents(loom, 1000, 200)) in (5, 6)
    with pytest.raises(MethodError, match=r"a prompt has at least \d+ tokens here, got length 20"):
        prompt_of(loom, 20, 64)


def test_lengths_that_do_not_fit_are_named() -> None:
    fit, skipped = fitting([10, 20, 30], 25, 5)
    assert (fit, [each["length"] for each in skipped]) == ([10, 20], [30])
    assert skipped[0]["why"] == "30 tokens and 5 new ones do not fit, the model takes 25"
    assert fitting([10], None, 5) == ([10], [])
    with pytest.raises(MethodError, match="no length fits the model, which takes 25 tokens"):
        fitting([30], 25, 5)


def test_random_models_are_the_same_each_time() -> None:
    first, second = (open_model("random:toy", chunk_tokens=64, store="memory:") for _ in range(2))
    assert first.decoder.fingerprint == second.decoder.fingerprint
    assert Bytes().decode(Bytes().encode("née")) == "née"
    with pytest.raises(ModelError, match="unknown shape 'random:to'; did you mean 'random:toy'"):
        open_model("random:to", chunk_tokens=64, store="memory:")


def test_transformers_runs_with_its_own_attention_and_kvloom_again_after_it(loom: Loom) -> None:
    with own_attention(loom.decoder) as model:
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "kvloom"
    loom.full_prefill(prompt_of(loom, 64, 64))


def test_ttft_measures_each_way(loom: Loom, tmp_path: Path) -> None:
    lengths: list[int] = []
    found = ttft.run(
        "random:toy",
        loom,
        lengths=[200, 300, 5000],
        ratios=[0.1, 0.5],
        repeats=2,
        chunk_tokens=64,
        on_length=lambda so_far: lengths.append(so_far["results"][-1]["length"]),
    )
    assert_documented(found, "ttft")
    assert lengths == [200, 300]
    assert [each["length"] for each in found["skipped"]] == [5000]
    lines = [line for line in found["results"] if line["length"] == 200]
    reuse = [
        f"{name} {share} %{where}"
        for name in ("infoflow", "cacheblend", "epic")
        for share, where in ((10, ""), (50, ""), (50, ", disk"))
    ]
    assert [label(line) for line in lines] == ["transformers", "full", "none", "none, disk", *reuse]
    by_label = {label(line): line for line in lines}
    assert by_label["full"]["of_full"] == by_label["full"]["bound_of_full"] == 1.0
    assert by_label["full"]["flops_of_full"] == 1.0 > by_label["none"]["flops_of_full"] > 0.1
    for name, line in by_label.items():
        assert line["ttft_s"]["low"] <= line["ttft_s"]["median"] <= line["ttft_s"]["high"]
        assert line["bound_s"] > 0
        assert line["quotient"] == pytest.approx(line["ttft_s"]["median"] / line["bound_s"])
        assert line["bound_s"] == pytest.approx(sum(part["bound_s"] for part in line["parts"].values()))
        assert ("load" in line["parts"]) == (name not in ("transformers", "full"))
    assert by_label["none, disk"]["parts"]["load"]["bound_s"] > 0
    assert by_label["none"]["parts"]["load"]["quotient"] is None
    context = 200 - by_label["none"]["question_tokens"]
    assert by_label["infoflow 10 %"]["rows"] == by_label["epic 10 %"]["rows"] == int(0.1 * context)
    assert by_label["none"]["rows"] == 0
    drawn = write_plot(tmp_path, found).read_text()
    assert drawn.count("random:toy") == 2
    assert "infoflow 50 %, disk" in drawn


def test_each_clock_sees_its_part(loom: Loom, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 ms more in every choice of rows belong to the score and to no other part."""
    from kvloom.selectors import InfoFlow

    score = InfoFlow.score

    def slow(self: InfoFlow, probe: Any) -> Any:
        time.sleep(0.03)
        return score(self, probe)

    monkeypatch.setattr(InfoFlow, "score", slow)
    found = ttft.run(
        "random:toy", loom, lengths=[200], methods=["infoflow"], ratios=[0.2], repeats=1, chunk_tokens=64
    )
    line = found["results"][0]
    assert line["parts"]["score"]["seconds"] >= 0.03
    assert line["ttft_s"]["median"] >= 0.03 + line["parts"]["recompute"]["seconds"]
    assert line["of_full"] is None, "full prefill was not measured"


def test_index_and_decode_measure_both_ways(loom: Loom) -> None:
    found = index.run("random:toy", loom, lengths=[300], repeats=1, chunk_tokens=64)
    assert_documented(found, "index")
    ours, theirs = found["results"]
    assert (ours["method"], theirs["method"], theirs["of_transformers"]) == ("index", "transformers", 1.0)
    assert 300 <= ours["tokens"] == theirs["tokens"] < 400
    assert ours["bound_s"] > 0 < theirs["bound_s"]
    found = decode.run("random:toy", loom, lengths=[100], repeats=1, steps=3)
    assert_documented(found, "decode")
    assert [line["method"] for line in found["results"]] == ["kvloom", "dynamic", "static"]
    assert found["results"][1]["of_dynamic"] == 1.0
    middle = 100 + decode.WARM_UP + 1
    assert found["results"][0]["read_bytes"] == 4 * (4 * 36864 + 64 * 512) + middle * 4 * 64 * 4


@pytest.mark.parametrize("length", [100, 500])
def test_a_slow_step_shows(loom: Loom, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, logits = loom.full_prefill(prompt_of(loom, length, 64), reserve=8)
    forward = loom.decoder.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(loom.decoder, "forward", slow)
    assert decode.ours(loom.decoder, cache, logits, 8) >= 20
    assert cache.num_rows == length, "the next run goes on from the same cache"


@pytest.mark.parametrize(
    ("methods", "ratios", "sentence"),
    [
        (["infoflw"], [0.1], "unknown method 'infoflw'; did you mean 'infoflow'?"),
        (["infoflow"], [1.5], "infoflow: ratio is the share of rows to recompute, from 0 to 1, got 1.5"),
    ],
)
def test_ways_are_checked(methods: list[str], ratios: list[float], sentence: str) -> None:
    with pytest.raises(MethodError, match=re.escape(sentence)):
        ttft.ways(methods, ratios)


def test_other_tokenizers_do() -> None:
    assert prompt_of(loom_of("qwen3"), 150, 64).num_tokens == 150
