"""fidelity and influence on a tiny model, and what they refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import matplotlib as mpl
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


@pytest.fixture(autouse=True)
def fonts(kvloom: Kvloom) -> None:
    """The list of fonts, which takes long to make, is that of this process."""
    kvloom.env["MPLCONFIGDIR"] = mpl.get_cachedir()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "haystack").mkdir(parents=True)
    lines = [f"Barge {n} carried {n * 7} tons of grey stone up the river to the town." for n in range(90)]
    (tmp_path / "data" / "haystack" / "barges.txt").write_text("\n\n".join(lines))
    return tmp_path / "data"


def test_fidelity_is_measured_reported_and_not_measured_twice(
    kvloom: Kvloom, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    args = ("fidelity", "prose", "--out", "run", "-m", tiny_model, "--data", data, "--documents", "2")
    some = ("--prefix", "64", "--continuation", "256", "-c", "snapkv:window=8", "-c", "random:last=8")
    done = kvloom.ok(*args, *some, "--keep", "0.3", "--keep", "0.6")
    assert done.sentence == "kvloom: 8 results; written: run/report.html"
    assert done.stdout == (tmp_path / "run" / "report.md").read_text()
    assert "snapkv:window=8 at keep 0.3 against random:last=8 (chance), equal bytes: " in done.stdout
    lines = (tmp_path / "run" / "results.jsonl").read_text()
    again = kvloom.ok(*args, *some, "--keep", "0.3", "--keep", "0.6", "--json").json
    assert again == {"out": "run", "results": 8, "report": "run/report.html"}
    assert (tmp_path / "run" / "results.jsonl").read_text() == lines
    sentence = kvloom.refused(*args, *some, "--keep", "0.3")
    assert "keeps [0.3, 0.6] there, [0.3] now" in sentence
    sentence = kvloom.refused(*args, "--prefix", "4000")
    assert sentence == "documents of 5,025 tokens do not fit the model, which takes 2,048"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["pros"], "unknown text set 'pros'; did you mean 'prose'?"),
        (["prose", "prose"], "a text set is named twice: prose, prose"),
        (
            ["prose", "--continuation", "300"],
            "continuation is a number of tokens, at least 256 and a mul",
        ),
        (["prose", "-c", "rpc"], "rpc compresses answers while they grow"),
        (["prose", "-c", "knorm:keep=0.4"], "'knorm:keep=0.4': keep is given with the method and for all"),
        (
            ["prose", "--keep", "0"],
            "infokv: keep is the share of tokens to keep, above 0 and at most 1",
        ),
        (["prose", "--documents", "0"], "invalid value for '--documents'"),
    ],
)
def test_bad_options_of_fidelity_are_found_before_the_model(
    kvloom: Kvloom, data: Path, options: list[str], sentence: str
) -> None:
    args = ("--out", "run", "-m", "./no-model", "--data", data)
    assert kvloom.refused("fidelity", *options, *args).startswith(sentence)


def test_influence_is_measured_reported_and_not_measured_twice(
    kvloom: Kvloom, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    args = ("influence", "prose", "--out", "run", "-m", tiny_model, "--data", data, "--documents", "2")
    some = ("--prefix", "64", "--continuation", "256", "--window", "8", "-r", "entropy", "-r", "random:late")
    more = ("--share", "0.1", "--singles", "4", "--direct", "--seed", "3")
    done = kvloom.ok(*args, *some, *more)
    assert done.sentence == "kvloom: 24 results; written: run/report.html"
    assert done.stdout == (tmp_path / "run" / "report.md").read_text()
    assert "### 10.0% of the rows, direct effect, 2 documents" in done.stdout
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (recipe["effects"], recipe["window"], recipe["seed"]) == (["total", "direct"], 8, 3)
    lines = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {line["num_removed"] for line in lines} == {6, 1}
    again = kvloom.ok(*args, *some, *more, "--json").json
    assert again == {"out": "run", "results": 24, "report": "run/report.html"}
    assert "seed 3 there, 0 now" in kvloom.refused(*args, *some, *more[:-2])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["prose", "-r", "entropi"], "set 'entropi': unknown score 'entropi'; did you mean 'entropy'?"),
        (["prose", "-r", "entropy:first"], "set 'entropy:first': 'first' is not one of matched, early"),
        (["prose", "--share", "1"], "share of rows to remove lies above 0 and below 1, got 1.0"),
        (["pros"], "unknown text set 'pros'"),
        (["prose", "--continuation", "128"], "continuation is a number of tokens, at least 256"),
    ],
)
def test_bad_options_of_influence_are_found_before_the_model(
    kvloom: Kvloom, data: Path, options: list[str], sentence: str
) -> None:
    args = ("--out", "run", "-m", "./no-model", "--data", data)
    assert kvloom.refused("influence", *options, *args).startswith(sentence)
