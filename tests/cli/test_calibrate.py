"""calibrate, and what ask and verify make of its profile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom

from kvloom.selectors.infoflow import resolve_layers

BAND = "0-0.5"


def profiles(kvloom: Kvloom) -> list[Path]:
    return list((kvloom.store.parent / "profiles").glob("*"))


def test_calibrate_shows_every_layer_and_saves_what_ask_and_verify_use(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    done = kvloom.ok("calibrate", "-m", tiny_model, "--samples", "4")
    (path,) = profiles(kvloom)
    profile = json.loads(path.read_text())
    assert path.stem == profile["fingerprint"]
    assert (profile["model"], profile["num_layers"]) == (str(tiny_model), 4)
    assert (profile["recipe"]["samples"], profile["recipe"]["length"]) == (4, 1000)
    assert done.sentence == (
        f"kvloom: written: {path}; from now on infoflow scores layers {profile['layers']} on this model"
    )
    lines = done.stdout.splitlines()
    for layer, scores in enumerate(profile["per_layer"]):
        (line,) = [line.split() for line in lines if line.strip().startswith(f"{layer} ")]
        assert line[1:5] == [f"{value:.3f}" for name, value in scores.items() if name != "layers"]
        assert set(line[6]) == {"█"}
    marked = [int(line.split()[0]) for line in lines if line.rstrip().endswith("*")]
    assert tuple(marked) == resolve_layers(profile["layers"], 4)
    for label, name in (("best band", "best"), ("default", "default"), ("paper's band", "paper")):
        (line,) = [line for line in lines if line.strip().startswith(label)]
        assert f"{profile['held_out'][name]['needle_ap']:.3f}" in line
    assert "".join(profile["why"].split()) in "".join(done.stdout.split())

    ask = ("ask", "Who bought the mill?", texts, "-m", tiny_model, "--max-new-tokens", "1")
    path.write_text(json.dumps(profile | {"layers": BAND, "date": "2026-12-01"}))
    told = f"kvloom: layers {BAND} from the profile calibrated on 2026-12-01 (kvloom calibrate)"
    remarks = kvloom.ok(*ask).stderr.splitlines()
    assert remarks[0] == told
    assert remarks[1].startswith(f"kvloom: infoflow 15% layers={BAND}: first token after ")
    answered = kvloom.ok(*ask, "-o", "ratio=0.3", "--json")
    assert answered.sentence == told
    assert f"ratio=0.3, reduction='norm', layers='{BAND}'" in answered.json["trace"]["method"]
    verified = kvloom("verify", texts, "-m", tiny_model, "-q", "Who bought the mill?", "--json")
    assert verified.sentence == told
    assert f"layers='{BAND}'" in verified.json["judged"]
    # Never what is explicit, another method, another model, or with the switch off.
    assert "layers='0.25-1'" in kvloom.ok(*ask, "-o", "layers=0.25-1", "--json").json["trace"]["method"]
    for others in (["-o", "layers=0.25-1"], ["-s", "cacheblend"], ["--dtype", "bfloat16"]):
        assert "from the profile" not in kvloom.ok(*ask, *others).stderr
    off = kvloom.ok(*ask, "--json", env={"KVLOOM_PROFILE": "off"})
    assert (off.stderr, "layers='0.25-1'" in off.json["trace"]["method"]) == ("", True)
    assert "got 'no'" in kvloom.refused(*ask, env={"KVLOOM_PROFILE": "no"})
    path.write_text("{")
    sentence = kvloom.refused(*ask, code=1)
    assert sentence == f"profile {path} is damaged: it is not JSON; delete it, or run kvloom calibrate again"
    kvloom.ok("calibrate", "-m", tiny_model, "--samples", "4")
    assert json.loads(path.read_text())["layers"] == profile["layers"]


def test_calibrate_on_texts_of_ones_own_to_a_file_of_ones_own(
    kvloom: Kvloom, tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("one.txt", "two.md"):
        lines = [f"Barge {name} {n} carried grey stone up the river to the town." for n in range(40)]
        (tmp_path / name).write_text("\n\n".join(lines))
    args = ("calibrate", "-m", tiny_model, "--text", tmp_path / "one.txt", "--samples", "4", "--ratio", "0.3")
    options = (*args, "--text", tmp_path / "two.md", "--length", "800", "--seed", "5")
    done = kvloom.ok(*options, "--json", "--out", "mine.json")
    assert done.sentence == "kvloom: written: mine.json"
    assert done.json == json.loads((tmp_path / "mine.json").read_text())
    assert profiles(kvloom) == []
    recipe = done.json["recipe"]
    assert [recipe[name] for name in ("samples", "length", "ratio", "seed")] == [4, 800, 0.3, 5]
    one = kvloom.ok(*args, "--length", "800", "--seed", "5", "--json", "--out", "mine.json").json
    assert one["recipe"]["text"] != recipe["text"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--samples", "3"], "calibration needs at least 4 samples, got 3"),
        (["--ratio", "0"], "ratio is a share of rows, above 0 and below 1, got 0.0"),
        (["--ratio", "1.5"], "ratio is a share of rows, above 0 and below 1, got 1.5"),
        (["--length", "100"], "length is a number of tokens and at least 750, got 100"),
        (["--text", "no.txt"], "no.txt does not exist; give a file, a folder, or - for standard input"),
        (["--text", "latin.txt"], "latin.txt:1 is not UTF-8; save the file as UTF-8 text"),
        (["--out", "no/profile.json"], "--out no/profile.json is not a file in a folder that exists; name"),
        (["--out", "."], "--out . is not a file in a folder that exists; name one, such as profile.json"),
    ],
)
def test_bad_options_are_found_before_the_model(
    kvloom: Kvloom, tmp_path: Path, options: list[str], sentence: str
) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert kvloom.refused("calibrate", "-m", "./no-model", *options).startswith(sentence)


def test_lengths_that_text_or_model_do_not_have(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A short text.")
    sentence = kvloom.refused("calibrate", "-m", tiny_model, "--text", "short.txt")
    assert sentence.endswith(
        "tokens, prompts of 1,000 are asked for; give more text or ask for a smaller length"
    )
    (tmp_path / "long.txt").write_text("\n\n".join(f"Barge {n} carried grey stone." for n in range(400)))
    sentence = kvloom.refused("calibrate", "-m", tiny_model, "--text", "long.txt", "--length", "2040")
    assert sentence.endswith("model takes 2,048; ask for a smaller length")
    assert profiles(kvloom) == []
