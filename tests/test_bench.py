from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_models import loom_of

import kvloom
from kvloom.eval.benchmark import Sample
from kvloom.eval.journal import Journal, read_lines
from kvloom.prompt import Document
from kvloom.selectors import InfoFlow, NoRecompute

BENCH = Path(__file__).parent.parent / "bench"
TOWNS = (("Ada", "Paris"), ("Bob", "Rome"), ("Cleo", "Oslo"))


def test_a_killed_indexing_process_loses_nothing() -> None:
    """Ten kills at random moments; the full two hundred are for the command line."""
    environment = os.environ | {"PYTHONPATH": str(Path(kvloom.__path__[0]).parent)}
    command = [sys.executable, str(BENCH / "store_kill.py"), "--rounds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *counts = done.stdout.splitlines()
    assert first.startswith("10 kills, ")
    assert len(counts) == 6
    assert all(line.endswith(": 0") for line in counts)


def test_the_store_bench_measures_each_operation(tmp_path: Path) -> None:
    bench: dict[str, Any] = runpy.run_path(str(BENCH / "store.py"))
    rows = bench["many"](tmp_path / "many", 20)
    assert len({operation for operation, _, _ in rows}) == len(rows) == 11
    assert all(seconds > 0 and number > 0 for _, seconds, number in rows)
    speeds = bench["bandwidth"](tmp_path / "one", 1, bench["torch"].float32)
    assert set(speeds) == {"plain read", "store", "torch.load"}
    assert all(speed > 1e6 for speed in speeds.values())


def test_load_reads_ahead_and_in_turn(tmp_path: Path) -> None:
    bench: dict[str, Any] = runpy.run_path(str(BENCH / "load.py"))
    loom = loom_of("llama", store=f"disk:{tmp_path}?codec=bf16")
    prompt = loom.prompt("Who?", [f"{name} lives in {town}." for name, town in TOWNS])
    loom.splice(prompt)
    for is_ahead in (True, False):
        whole, waited, read = bench["splice"](loom, prompt, is_ahead=is_ahead)
        assert 0 < waited < whole
        assert read > 0
        assert loom.chunks.reads_ahead is is_ahead


def test_codecs_measures_each_codec_once_with_raw_as_its_own_yardstick(tmp_path: Path) -> None:
    bench: dict[str, Any] = runpy.run_path(str(BENCH / "codecs.py"))
    documents = tuple(Document(f"{name} lives in {town}." * 6, id=name, title=name) for name, town in TOWNS)
    samples = [
        Sample(f"s{n}", f"Where does {TOWNS[n][0]} live?", (TOWNS[n][1],), documents) for n in range(2)
    ]
    methods = [NoRecompute(), InfoFlow(ratio=0.15)]
    loom = loom_of("llama")
    names = ["raw", "bf16", "int4", "int4+zstd"]
    for codecs in (names[:2], names, names):  # the last finds everything done
        journal = Journal(tmp_path, bench["Recipe"]("tiny", 0.15, "float32"), ("set", "sample", "codec"))
        bench["run"](loom, journal, "towns", samples, methods, codecs)
    lines = read_lines(journal.results)
    assert sorted((line["sample"], line["codec"]) for line in lines) == sorted(
        (sample.id, codec) for sample in samples for codec in names
    )
    taken = {line["codec"]: line for line in lines if line["sample"] == "s0"}
    assert taken["raw"]["to_raw"] == {"none": 0.0, "infoflow": 0.0}
    assert 0 < taken["bf16"]["to_raw"]["none"] < taken["int4"]["to_raw"]["none"]
    assert taken["int4"]["kl"] == taken["int4+zstd"]["kl"]
    assert taken["raw"]["num_bytes"] > 1.8 * taken["bf16"]["num_bytes"] > 3 * taken["int4"]["num_bytes"]
    rows = [line.strip("| ").split(" | ") for line in bench["table"](lines, methods)]
    assert [row[0] for row in rows[2:-2]] == names
    assert float(rows[2][2]) == 1.0
    assert rows[2][7].startswith("+0.00")
    assert rows[-1] == ["2 samples"]
