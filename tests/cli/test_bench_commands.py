"""bench: each command on a model of a toy's shape, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from command_line import Kvloom

ROOT = Path(__file__).parents[2]
TOY = ("-m", "random:toy", "--chunk-tokens", "64")


def test_ttft_prints_tables_and_writes_what_it_found(kvloom: Kvloom, tmp_path: Path) -> None:
    some = ("--methods", "full,none,infoflow", "--ratios", "0.1", "--repeats", "1")
    done = kvloom.ok("bench", "ttft", *TOY, "--lengths", "200,4K", *some, "--out", "bench")
    assert done.stderr.splitlines() == [
        "kvloom: skipped: 4,096 tokens and 1 new ones do not fit, the model takes 2,048",
        "kvloom: written: bench/ttft.json",
        "kvloom: written: bench/ttft.svg",
    ]
    assert "200 tokens, KV 204.8 kB" in done.stdout
    assert "infoflow 10 %, disk" in done.stdout
    assert all(len(line) <= 100 for line in done.stdout.splitlines()[:-1])
    found = json.loads((tmp_path / "bench" / "ttft.json").read_text())
    assert [line["method"] for line in found["results"]] == ["full", *2 * ["none"], *2 * ["infoflow"]]
    assert (tmp_path / "bench" / "ttft.svg").read_text().startswith("<?xml")


def test_index_and_decode_print_tables_or_json(kvloom: Kvloom) -> None:
    assert "of transformers" in kvloom.ok("bench", "index", *TOY, "--lengths", "200", "--repeats", "1").stdout
    args = ("bench", "decode", "-m", "random:toy", "--lengths", "100", "--repeats", "1", "--steps", "2")
    assert "after 100 tokens, KV 102.4 kB" in kvloom.ok(*args).stdout
    found = kvloom.ok(*args, "--json").json
    assert [line["method"] for line in found["results"]] == ["kvloom", "dynamic", "static"]


def test_memory_is_that_of_a_process_of_its_own(kvloom: Kvloom) -> None:
    args = ("bench", "memory", *TOY, "--lengths", "500", "--methods", "infoflow", "--json")
    found = kvloom.ok(*args).json
    (line,) = found["results"]
    docs = (ROOT / "docs" / "benchmarks.md").read_text()
    row = next(row for row in docs.splitlines() if row.startswith("| memory | `"))
    assert all(f"`{key}`" in row for key in set(line) - {"length", "method"})
    assert line["kv_bytes"] == (500 + 4) * 4 * 64 * 4
    assert line["model_bytes"] == 4 * (4 * (36864 + 2 * 64) + 2 * 64 * 512 + 64)
    assert line["before_bytes"] > 1e8, "Python and torch are in it"
    assert line["grown_bytes"] == line["peak_bytes"] - line["before_bytes"] >= 0


def test_memory_of_another_process_fails_in_one_sentence(kvloom: Kvloom) -> None:
    sentence = kvloom.refused("bench", "memory", *TOY, "--lengths", "4K")
    assert sentence == "no length fits the model, which takes 2,048 tokens; give shorter --lengths"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["ttft", "--lengths", "1M"], "a length is a number of tokens such as 512 or 2K, got '1M'"),
        (["ttft", "--ratios", "0.1,15"], "a ratio is a share of rows from 0 to 1, such as 0.15, got '15'"),
        (["ttft", "--methods", "full,infoflw"], "unknown method 'infoflw'; did you mean 'infoflow'?"),
        (["ttft", "--lengths", "4K"], "no length fits the model, which takes 2,048 tokens"),
        (["ttft", "--lengths", "20"], "a prompt has at least"),
        (["ttft", "--out", "a-file/runs"], "cannot write to the folder 'a-file/runs': Not a directory"),
        (["index", "--lengths", ""], "a length is a number of tokens such as 512 or 2K, got ''"),
        (["index", "--chunk-tokens", "4000"], "no length fits the model"),
        (["decode", "--out", "a-file"], "cannot write to the folder 'a-file': File exists"),
        (["decode", "--steps", "0"], "invalid value for '--steps'"),
        (["memory", "--ratio", "2"], "invalid value for '--ratio'"),
        (["memory", "--methods", "epik"], "unknown method 'epik'; did you mean 'epic'?"),
    ],
)
def test_bad_input_is_one_sentence(kvloom: Kvloom, tmp_path: Path, args: list[str], sentence: str) -> None:
    (tmp_path / "a-file").write_text("")
    assert kvloom.refused("bench", *args, "-m", "random:toy").startswith(sentence)


def test_a_shape_that_is_not_known_is_named(kvloom: Kvloom) -> None:
    sentence = kvloom.refused("bench", "decode", "-m", "random:llama-70b", code=1)
    assert sentence == "unknown shape 'random:llama-70b'; did you mean 'random:llama-8b'?"


def test_the_script_for_a_gpu_runs_at_toy_size(tmp_path: Path) -> None:
    environment = os.environ | {
        "KVLOOM": f"{sys.executable} -m kvloom",
        "PYTHONPATH": str(ROOT),
        "MODELS": "random:toy",
        "LENGTHS": "256",
        "LONGEST": "256",
        "DEVICE": "cpu",
        "DTYPE": "float32",
    }
    script = ["bash", str(ROOT / "bench" / "gpu.sh"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [
        *("decode.json", "index.json", "memory.json", "ttft.json", "ttft.svg")
    ]
    late = subprocess.run(
        script, capture_output=True, text=True, env=environment | {"LIMIT_S": "0"}, check=False
    )
    assert (late.returncode, late.stdout.count("left out: bench")) == (1, 4)
