"""The report on results made up here, so small that every number is worked out by hand."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from made_results import FLOW, FULL, NONE, Samples, by_method, grid, words, write

from kvloom.errors import EvalError
from kvloom.eval import plots
from kvloom.eval.benchmarks.needle import Needle
from kvloom.eval.facts import eval_command
from kvloom.eval.report import Report, report
from kvloom.eval.runner import Recipe
from kvloom.eval.runs import merge, read
from kvloom.prompt import PromptFormat

if TYPE_CHECKING:
    from pathlib import Path


def small(tmp_path: Path, **given: Any) -> Report:
    return report(
        [write(tmp_path / "a", {"hotpotqa": {"full": FULL, "none": NONE, "infoflow": FLOW}}, **given)]
    )


@pytest.mark.usefixtures("undrawn")
def test_quality_and_cost_by_hand(tmp_path: Path) -> None:
    rows = by_method(grid(small(tmp_path).markdown, "Results: hotpotqa"))
    assert list(rows) == ["none", "infoflow ratio=0.15", "full"], "between its anchors"
    flow, full, none = rows["infoflow ratio=0.15"], rows["full"], rows["none"]
    assert flow["N"] == "2"
    # 1 - (.5 + .5) / (1 + 3); of two samples drawn with replacement both are the first or both the second
    # in a quarter of the draws each: 1 - .5 / 1 and 1 - .5 / 3 are the ends.
    assert flow["KL gap closed"] == "75 % [50, 83]"
    assert flow["same, first token"] == "25 % [0, 50]"
    assert (flow["KL"], none["KL"], full["KL"]) == ("0.500", "2.000", "0")
    assert (none["KL gap closed"], full["KL gap closed"]) == ("0 %", "100 %")
    assert flow["rows"] == "15 (15 %)"
    assert (flow["token-layers"], flow["of full's"]) == ("200", "20 %")
    assert flow["TTFT / full's"] == "0.30", "the median of .1 and .5, not .55 / 1.5"
    assert flow["KV MB"] == "2.5"
    assert not {"F1", "EM", "contains"} & set(flow)


@pytest.mark.usefixtures("undrawn")
def test_answers_and_times_stand_beside_it(tmp_path: Path) -> None:
    seconds = {"load": 0.004, "score": 0.03, "recompute": 0.1, "decode": 9.0}
    flow = {
        "1": {
            "kl": 1,
            "f1": 0.5,
            "exact_match": 0,
            "contains": 1,
            "nll": 2,
            "agreement": 0.25,
            "seconds": seconds,
            "ttft": 0.134,
        },
        "2": {
            "kl": 1,
            "f1": 1.0,
            "exact_match": 1,
            "contains": 0,
            "nll": 4,
            "agreement": 0.75,
            "seconds": seconds,
            "ttft": 0.134,
        },
    }
    half = {"1": {"kl": 1, "f1": 0.5, "exact_match": 0}, "2": {"kl": 1}}
    folder = write(tmp_path / "a", {"hotpotqa": {"none": NONE, "infoflow": flow, "random": half}})
    row, random = grid(report([folder]).markdown, "Results: hotpotqa")[1:]
    assert (row["F1"], row["EM"], row["NLL"], row["agreement"]) == ("0.750", "0.500", "3.000", "0.500")
    assert row["contains"] == "0.500"
    assert row["TTFT ms (load / score / recompute)"] == "134 (4.0 / 30 / 100)"
    assert (random["F1"], random["EM"]) == ("", ""), "not the mean of those that happen to have it"
    assert (row["of full's"], row["TTFT / full's"]) == ("", ""), "full was not run"


@pytest.mark.usefixtures("undrawn")
def test_only_samples_that_all_methods_have_are_compared(tmp_path: Path) -> None:
    more = {"3": {"kl": 5.0}, "4": {"kl": 5.0}}
    late = {"1": {"kl": 0.2}} | more
    broken = {"1": {"kl": 0.2}, "2": {"kl": 0.2}, "3": {"kl": 9.0}, "4": {"kl": float("nan")}}
    sets = {"hotpotqa": {"none": NONE | more, "infoflow": FLOW | more, "epic": late, "random": broken}}
    text = report([write(tmp_path / "a", sets)]).markdown
    rows = by_method(grid(text, "Results: hotpotqa"))
    assert {row["N"] for row in rows.values()} == {"2"}
    assert rows["none"]["KL"] == "3.000", "of samples 1 and 3"
    assert (
        "Left out on hotpotqa: 2 of 4 samples (epic ratio=0.15 lacks 1; random ratio=0.15 has 1 whose" in text
    )


def test_no_sample_in_common_is_a_sentence(tmp_path: Path) -> None:
    sets = {"hotpotqa": {"none": {"1": {"kl": 1.0}}, "infoflow": {"2": {"kl": 1.0}}}}
    made = report([write(tmp_path / "a", sets)])
    assert "No sample has been run by all methods." in made.markdown
    assert made.plots == {}


@pytest.mark.usefixtures("undrawn")
def test_a_gap_of_zero_is_no_gap(tmp_path: Path) -> None:
    same = {"1": {"kl": 0.0}, "2": {"kl": 0.0}}
    one = {"1": {"kl": 2.0}}
    sets = {
        "hotpotqa": {"none": same, "infoflow": same},
        "xquad": {"none": one, "infoflow": {"1": {"kl": 1.0}}},
    }
    made = report([write(tmp_path / "a", sets)])
    assert {row["KL gap closed"] for row in grid(made.markdown, "Results: hotpotqa")} == {"no gap"}
    assert grid(made.markdown, "Results: xquad")[1]["KL gap closed"] == "50 %", "one sample has no interval"
    assert not re.search(r"\bnan\b", made.markdown + made.html.read_text(), flags=re.IGNORECASE)


@pytest.mark.usefixtures("undrawn")
def test_paired_test_against_the_best_infoflow_or_the_one_named(tmp_path: Path) -> None:
    better = {"1": {"kl": 0.25}, "2": {"kl": 0.5}}
    sets = {"hotpotqa": {"none": NONE, "infoflow": FLOW, "infoflow:ratio=0.3": better}}
    folder = write(tmp_path / "a", sets)
    rows = by_method(grid(report([folder]).markdown, "Paired tests against infoflow ratio=0.3"))
    assert list(rows) == ["none", "infoflow ratio=0.15"]
    # .75 and 2.5 above the baseline; of the four patterns of signs, two are as far from 0
    assert rows["none"]["KL difference"] == "+1.625 [+0.750, +2.500]"
    assert rows["none"]["p"] == "0.5000"
    # .25 and 0: the latter has no sign
    assert (rows["infoflow ratio=0.15"]["KL difference"], rows["infoflow ratio=0.15"]["p"]) == (
        "+0.125 [0, +0.250]",
        "1.0000",
    )
    named = report([folder], baseline="none").markdown
    rows = by_method(grid(named, "Paired tests against none"))
    assert rows["infoflow ratio=0.15"]["KL difference"] == "-1.500 [-2.500, -0.500]".replace(
        "-", "\N{MINUS SIGN}"
    )
    with pytest.raises(
        EvalError, match="'nome' is not in the results; there are: none, infoflow, infoflow:r"
    ):
        report([folder], baseline="nome")


@pytest.mark.usefixtures("undrawn")
def test_without_infoflow_the_first_method_is_the_baseline(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"hotpotqa": {"none": NONE, "epic": FLOW}})
    assert "Paired tests against none\n" in report([folder]).markdown


@pytest.mark.usefixtures("undrawn")
def test_sets_pooled_and_multihop_apart(tmp_path: Path) -> None:
    one = {"9": {"kl": 4.0}}, {"9": {"kl": 3.0}}
    sets = {
        "hotpotqa": {"none": NONE, "infoflow": FLOW},
        "musique": {"none": {"7": {"kl": 2.0}}, "infoflow": {"7": {"kl": 0.5}}, "epic": {"7": {"kl": 1.0}}},
        "xquad": {"none": one[0], "infoflow": one[1]},
    }
    text = report([write(tmp_path / "a", sets)]).markdown
    pooled = by_method(grid(text, "Results: all sets"))
    assert pooled["infoflow ratio=0.15"]["N"] == "4"
    assert pooled["infoflow ratio=0.15"]["KL gap closed"].startswith("55 % ["), "1 - 4.5 / 10"
    assert "epic ratio=0.15" not in pooled
    assert "Not on all of hotpotqa, musique, xquad, so left out here: epic ratio=0.15." in text
    multi, single = grid(text, "Multi-hop apart", 0), grid(text, "Multi-hop apart", 1)
    assert "Multi-hop: hotpotqa, musique." in text
    assert (multi[1]["N"], multi[1]["KL gap closed"].split(" [")[0]) == ("3", "75 %"), "1 - 1.5 / 6"
    assert (single[1]["sets"], single[1]["N"], single[1]["KL gap closed"]) == ("single-hop", "1", "25 %")


def test_kinds_apart(tmp_path: Path) -> None:
    kinds = {"1": {"kind": "2hop"}, "2": {"kind": "3hop1"}}
    sets = {
        "musique": {
            "none": {sample: NONE[sample] | kinds[sample] for sample in kinds},
            "infoflow": {sample: FLOW[sample] | kinds[sample] for sample in kinds},
        }
    }
    made = report([write(tmp_path / "a", sets)])
    rows = grid(made.markdown, "musique by kind")
    found = {(row["kind"], row["method"]): row["KL gap closed"] for row in rows}
    assert found == {
        ("2hop", "none"): "0 %",
        ("2hop", "infoflow"): "50 %",
        ("3hop1", "none"): "0 %",
        ("3hop1", "infoflow"): "83 %",
    }
    assert words(made.plots["kinds-musique"])[:4] == ["2hop", "N = 1", "3hop1", "N = 1"]


def marks(svg: str, colour: str) -> list[tuple[float, float]]:
    """Where a colour's marks stand, from left to right, the ends of intervals among them. The legend's
    do not count.
    """
    svg = svg.split("-legend_")[0]
    found = re.findall(r'<use xlink:href="[^"]*" x="([\d.]+)" y="([\d.]+)" style="([^"]*)"', svg)
    return sorted((float(x), float(y)) for x, y, style in found if f"fill: {colour}" in style)


def test_quality_plot_puts_points_where_they_belong(tmp_path: Path) -> None:
    svg = small(tmp_path).plots["quality"]
    none, full = marks(svg, plots.FAINT)[0], marks(svg, plots.FAINT)[-1]
    across = [(x - none[0]) / (full[0] - none[0]) for x, _ in marks(svg, plots.COLOURS[0])]
    up = sorted((y - none[1]) / (full[1] - none[1]) for _, y in marks(svg, plots.COLOURS[0]))
    assert across == pytest.approx([(200 - 50) / (1000 - 50)] * 3, rel=1e-3)
    assert up == pytest.approx([0.5, 0.75, 5 / 6], rel=1e-3), "the ends of the interval and its mean"
    assert "token-layers, share of full prefill's" in words(svg)


def test_ttft_bars_are_as_long_as_the_stages(tmp_path: Path) -> None:
    seconds = {"load": 0.01, "score": 0.03, "recompute": 0.0}
    flow = {sample: {"kl": 0.5, "seconds": seconds} for sample in NONE}
    svg = report([write(tmp_path / "a", {"hotpotqa": {"none": NONE, "infoflow": flow}})]).plots["ttft"]
    assert "recompute" not in words(svg)
    assert words(svg)[-2:] == ["load", "score"]
    (load_from, load_to), (score_from, score_to) = (
        longest_bar(svg, plots.STAGE_COLOURS[stage]) for stage in ("load", "score")
    )
    assert score_to - score_from == pytest.approx(3 * (load_to - load_from), rel=1e-3)
    assert score_from == pytest.approx(load_to, abs=0.01), "stacked"


def longest_bar(svg: str, colour: str) -> tuple[float, float]:
    """From where to where it reaches."""
    paths = re.findall(rf'<path d="([^"]+)"[^>]*style="fill: {colour}', svg.split("-legend_")[0])
    spans = [[float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)] for path in paths]
    return max(((min(xs), max(xs)) for xs in spans), key=lambda span: span[1] - span[0])


@pytest.mark.usefixtures("undrawn")
def test_merging_takes_the_newer_and_times_only_within_a_run(tmp_path: Path) -> None:
    old = write(tmp_path / "old", {"hotpotqa": {"full": FULL, "none": NONE, "infoflow": FLOW}})
    newer = {"1": {"kl": 0.1}, "2": {"kl": 0.1}}
    epic = {"1": {"kl": 1.0}, "2": {"kl": 1.0}}
    new = write(tmp_path / "new", {"hotpotqa": {"infoflow:ratio=0.15": newer, "epic": epic}})
    os.utime(old / "results.jsonl", (1, 1))
    for folders in ([old, new], [new, old], [old, new, old]):
        text = report(folders, tmp_path / "out").markdown
        assert text.count("\n## ") == 1
        rows = by_method(grid(text, "Results: hotpotqa"))
        assert rows["infoflow ratio=0.15"]["KL gap closed"].startswith("95 %"), "1 - .2 / 4"
        assert rows["epic ratio=0.15"]["KL gap closed"].startswith("50 %"), "against the other run's anchor"
        assert rows["epic ratio=0.15"]["TTFT / full's"] == ""
        assert rows["none"]["TTFT / full's"] == "0.08", (
            "the median of .1 / 1 and .1 / 2, rounded half to even"
        )
        assert (
            "infoflow ratio=0.15 stands twice on hotpotqa; that of new, the newer, is used (KL of a" in text
        )
        assert "differs by up to 0.4)" in text
    os.utime(new / "results.jsonl", (0, 0))
    rows = by_method(grid(report([old, new], tmp_path / "out").markdown, "Results: hotpotqa"))
    assert rows["infoflow ratio=0.15"]["KL gap closed"] == "75 % [50, 83]"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "0" * 64, "model": "other"},
        {"data": {"hotpotqa": "other samples"}},
        {"prompt_format": "PromptFormat(header='none')"},
        {"chunks": "fixed"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_runs_that_do_not_belong_together_stand_apart(tmp_path: Path, other: dict[str, Any]) -> None:
    sets = {"hotpotqa": {"none": NONE, "infoflow": FLOW}}
    made = report([write(tmp_path / "a", sets), write(tmp_path / "b", sets, **other)])
    assert made.markdown.count("\n## ") == 2
    assert "stands twice" not in made.markdown
    assert {"1-quality", "2-quality"} <= set(made.plots)


def test_compressed_chunks_are_named_and_are_not_the_anchor(tmp_path: Path) -> None:
    methods = {"none@snapkv:keep=0.4": NONE, "none": NONE, "infoflow:ratio=0.1@infokv": FLOW, "full": FULL}
    entries = merge([read(write(tmp_path / "a", {"small": methods}))])[0].tables["small"]
    titles = {entry.title: entry for entry in entries}
    assert set(titles) == {"none", "full", "none @ snapkv keep=0.4", "infoflow ratio=0.1 @ infokv keep=0.4"}
    assert [title for title, entry in titles.items() if entry.is_none] == ["none"]


def test_geometries_and_layers_all_else_equal(tmp_path: Path) -> None:
    sets = {
        "hotpotqa": {
            "none": NONE,
            "infoflow": FLOW,
            "infoflow:geometry=hl-hp": {"1": {"kl": 1.0}, "2": {"kl": 1.0}},
            "infoflow:geometry=tl-tp,ratio=0.3": {"1": {"kl": 1.0}, "2": {"kl": 1.0}},
            "infoflow:layers=10": {"1": {"kl": 0.0}, "2": {"kl": 1.0}},
            "infoflow:layers=9": {"1": {"kl": 1.0}, "2": {"kl": 0.0}},
        }
    }
    made = report([write(tmp_path / "a", sets)])
    assert made.markdown.count("### Geometries") == 1
    table = {row["geometry"]: row["hotpotqa"].split(" [")[0] for row in grid(made.markdown, "Geometries")}
    assert table == {"global": "75 %", "hl-hp": "50 %"}
    assert words(made.plots["layers-hotpotqa"])[:3] == ["9", "10", "0.25-1"]
    plain = small(tmp_path / "plain")
    assert "Geometries" not in plain.markdown
    assert "layers-hotpotqa" not in plain.plots


def test_needle_heatmaps(tmp_path: Path) -> None:
    def cells(f1: float | None) -> Samples:
        places = [(length, depth, turn) for length in (1000, 2000) for depth in (0, 50) for turn in (0, 1)]
        return {
            f"{length}_{depth}_{turn}": {
                "kl": length / 1000 + turn,
                "kind": f"length={length},depth={depth}",
                "f1": None if f1 is None else f1 * turn * (1 + depth / 50),
            }
            for length, depth, turn in places
        }

    made = report([write(tmp_path / "f1", {"needle": {"none": cells(0.2), "infoflow": cells(0.5)}})])
    numbers = [
        float(word) for word in words(made.plots["heatmap-needle"]) if re.fullmatch(r"\d\.\d\d", word)
    ][:8]
    assert numbers == [0.1, 0.1, 0.2, 0.2, 0.25, 0.25, 0.5, 0.5], "depths down, lengths across, means of two"
    assert "needle by kind" not in made.markdown
    by_kl = report([write(tmp_path / "kl", {"needle": {"none": cells(None), "infoflow": cells(None)}})])
    drawn = by_kl.plots["heatmap-needle"]
    numbers = [float(word) for word in words(drawn) if re.fullmatch(r"\d\.\d\d", word)]
    assert numbers[:4] == [1.5, 2.5, 1.5, 2.5]
    assert "KL to full prefill, nats per token" in words(drawn)


@pytest.mark.usefixtures("undrawn")
def test_head_says_what_was_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"hotpotqa": {"none": NONE, "infoflow": FLOW}}, limit=7)
    reasons = ["prompt has 5,048 tokens", "prompt has 6,000 tokens", "empty"]
    lines = [{"benchmark": "hotpotqa", "sample": f"s{n}", "reason": why} for n, why in enumerate(reasons)]
    (folder / "skipped.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report([folder], tmp_path / "out").markdown
    assert grid(text, "Data") == [
        {
            "set": "hotpotqa",
            "multi-hop": "yes",
            "licence": "CC BY-SA 4.0",
            "digest": "digest of ho",
            "N": "2",
            "skipped": "3",
        }
    ]
    assert "Skipped on hotpotqa: 2, for example prompt has 5,048 tokens\n" in text
    assert "Skipped on hotpotqa: 1, empty\n" in text
    assert "seed 0" in text
    assert "PromptFormat()" in text
    assert (tmp_path / "out" / "report.md").read_text() == text


def test_the_command_is_the_one_that_was_given() -> None:
    recipe = Recipe(
        model="bundled:smollm2",
        methods=["none", "infoflow:ratio=0.05,layers=1,2"],
        benchmarks=["HotpotQA()", repr(Needle(lengths=(1000, 2000), seed=3))],
        limit=50,
        chunks="fixed",
        prompt_format=repr(PromptFormat(chunk_tokens=2048, header="none")),
        max_new_tokens=16,
        fingerprint="",
        data={},
    )
    assert eval_command(recipe, "a b") == (
        "kvloom eval hotpotqa 'needle:lengths=[1000,2000],seed=3' -m bundled:smollm2 -s none "
        "-s infoflow:ratio=0.05,layers=1,2 --limit 50 --chunks fixed --chunk-tokens 2048 --header none "
        "--max-new-tokens 16 --out 'a b'"
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def test_the_page_asks_for_nothing_and_interprets_nothing(tmp_path: Path) -> None:
    evil = "<script>alert('$\\nosuch$')</script>"
    samples = {sample: NONE[sample] | {"kind": f"{evil}|{sample} [x](http://e.org)"} for sample in NONE}
    sets = {"hotpotqa": {"full": samples, "none": samples, evil: samples}}
    made = report([write(tmp_path / "a", sets, model=evil)])
    page = Tags()
    page.feed(made.html.read_text())
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    links = [value for name, value in page.attributes if name.split(":")[-1] in ("href", "src")]
    assert links
    assert all(link.startswith("#") for link in links)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    styles = made.html.read_text()
    used = {*(link[1:] for link in links), *re.findall(r"url\(#([^)]+)\)", styles)}
    assert used <= set(ids)
    assert not re.search(r"@import|url\((?!#)", styles)
    assert len(grid(made.markdown, "Results: hotpotqa")) == 3
    outside = re.sub(r"^```\n.*?^```$", "", made.markdown, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside.replace("\\<script", "")
    assert "](http" not in made.markdown


def test_drawings_take_the_colour_of_the_page(tmp_path: Path) -> None:
    svg = small(tmp_path).plots["quality"]
    assert "currentColor" in svg
    assert not re.search(r"fill: (#000000|#ffffff|black|white)", svg)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("no recipe", "has no run.json; name a folder that `kvloom eval --out` made"),
        ("half a recipe", "is not the recipe of a run of this version of kvloom"),
        ("no results", "has no results yet; let `kvloom eval --out a` run to its end first"),
        ("other lines", "holds a line that is no result of this version"),
        ("no cost", "holds a trace without token_layers"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, broken: str, message: str) -> None:
    folder = write(tmp_path / "a", {"hotpotqa": {"none": NONE}})
    results = folder / "results.jsonl"
    if broken == "no recipe":
        (folder / "run.json").unlink()
    elif broken == "half a recipe":
        (folder / "run.json").write_text('{"model": "tiny"}')
    elif broken == "no results":
        results.unlink()
    elif broken == "other lines":
        results.write_text('{"score": 1}\n')
    else:
        results.write_text(results.read_text().replace("token_layers", "tokens"))
    with pytest.raises(EvalError, match=re.escape(message)):
        report([folder])
    assert not (folder / "report.md").exists()


def test_nothing_to_report() -> None:
    with pytest.raises(EvalError, match="nothing to report"):
        report([])


def test_matplotlib_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "a", {"hotpotqa": {"none": NONE}})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EvalError, match=r"pip install kvloom\[plot\]"):
        report([folder])
    assert not (folder / "report.html").exists()
