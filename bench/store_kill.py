"""Kills an indexing process at random moments, and looks at what is left.

Usage: python bench/store_kill.py [--rounds 200] [--seed 0]

Each round forks a process that stores chunks and records documents of them in one folder with a quota that is
never reached, and kills it (SIGKILL) after 5 to 400 ms. Then the folder is opened anew, its index rebuilt,
and counted: documents that were recorded and are not there, chunks of theirs that are missing or wrong,
damaged entries, files that the sweep left, entries that the index does not know. All must be 0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvloom.kv import ChunkKV
from kvloom.store import DiskStore

CHUNKS_EACH = 3
QUOTA = 10 * 2**30


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunk(number: int) -> ChunkKV:
    """100 kB of `number`."""
    layers = tuple(torch.full((2, 64, 32), float(number)) for _ in range(3))
    return ChunkKV(torch.full((64,), number), layers, layers, fingerprint="model-a")


def index_forever(folder: Path, first: int, acknowledge: int) -> None:
    """Stores document after document, and writes the number of each that is recorded."""
    store = DiskStore(folder, quota_bytes=QUOTA)
    for document in range(first, first + 10**6):
        keys = [document * CHUNKS_EACH + place for place in range(CHUNKS_EACH)]
        for number in keys:
            store.put(key(number), chunk(number))
        store.documents.record(f"document {document}", [key(number) for number in keys])
        os.write(acknowledge, document.to_bytes(4, "little"))


def killed(folder: Path, first: int, after_s: float) -> list[int]:
    """The documents that were recorded until the process was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            index_forever(folder, first, writer)
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reader, "rb") as pipe:
        written = pipe.read()
    return [int.from_bytes(written[place : place + 4], "little") for place in range(0, len(written), 4)]


def faults(folder: Path, recorded: list[int]) -> dict[str, int]:
    """What is wrong with the folder after a kill; all 0 when nothing is."""
    store = DiskStore(folder, quota_bytes=QUOTA, sweep_after_s=0)
    entries = store.rebuild()
    known = {document.id: document for document in store.documents.all()}
    missing = wrong = 0
    for document in recorded:
        for place, name in enumerate(
            known[f"document {document}"].keys if f"document {document}" in known else ()
        ):
            kv = store.get(name)
            missing += kv is None
            wrong += kv is not None and int(kv.values[0][0, 0, 0]) != document * CHUNKS_EACH + place
    indexed = store.index.chunks()
    result = {
        "documents lost": sum(f"document {document}" not in known for document in recorded),
        "chunks missing": missing,
        "chunks wrong": wrong,
        "entries damaged": len(store.verify()),
        "leftovers": len(list(folder.rglob("*.tmp"))),
        "entries not in the index": entries - len(indexed or ()),
    }
    store.index.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, total, documents = random.Random(arguments.seed), {}, 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        for number in range(arguments.rounds):
            folder = Path(root) / str(number % 10)  # each folder is killed in several times
            first = number * 10**4
            recorded = killed(folder, first, rng.uniform(0.005, 0.4))
            documents += len(recorded)
            for fault, count in faults(folder, recorded).items():
                total[fault] = total.get(fault, 0) + count
    print(f"{arguments.rounds} kills, {documents} documents recorded, {time.perf_counter() - start:.0f} s")
    for fault, count in total.items():
        print(f"{fault}: {count}")
    return int(any(total.values()) or not documents)


if __name__ == "__main__":
    sys.exit(main())
