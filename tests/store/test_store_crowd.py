"""Eight processes write and read 500 chunks in a folder that holds a quarter of them: all reads are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from crowd_process import PROCESSES, chunk, key

from kvloom.store import DiskStore

CHUNKS, TURNS = 500, 540


def test_eight_processes_with_eviction_read_only_what_was_written(tmp_path: Path) -> None:
    probe = DiskStore(tmp_path / "probe")
    probe.put(key(0), chunk(0))
    entry = probe.size_of(key(0))
    quota = 125 * entry + CHUNKS  # heads differ by some bytes
    folder = tmp_path / "kv"
    script = Path(__file__).with_name("crowd_process.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(quota), str(CHUNKS), str(TURNS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    assert "died" not in seen
    assert (seen.get("WRONG", 0), seen["rejected"]) == (0, 0)
    misses = sum(number for what, number in seen.items() if what.startswith("miss"))
    assert seen["right"] + misses == PROCESSES * TURNS
    assert seen["right"] > 100
    assert seen["miss: evicted"] > 100
    assert seen["written"] > CHUNKS
    store = DiskStore(folder)
    assert store.stats().num_bytes <= quota + (PROCESSES + 1) * entry
    assert store.verify() == []
    assert not list(folder.rglob("*.tmp"))
