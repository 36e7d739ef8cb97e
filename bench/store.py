"""A disk store of many small chunks: seconds of each operation; and how fast large chunks are read.

Usage: python bench/store.py [--chunks 10000] [--megabytes 64] [--folder FOLDER]

Prints two Markdown tables. Entries of the first are of 8 tokens, so that files and index are measured and not
the bytes. Of the second, one chunk is read again and again from the page cache: through the store, checksum
included, by a plain read of its file, and by torch.load of the same tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvloom.kv import ChunkKV
from kvloom.store import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunk(number: int, tokens: int = 8, layers: int = 1, dtype: torch.dtype = torch.float32) -> ChunkKV:
    tensors = tuple(torch.full((2, tokens, 64), float(number % 1000)).to(dtype) for _ in range(layers))
    return ChunkKV(torch.arange(tokens), tensors, tensors, fingerprint="model-a")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def many(folder: Path, chunks: int) -> list[tuple[str, float, int]]:
    """(operation, seconds in all, how many) over a store of `chunks` entries."""
    store = DiskStore(folder)
    rows = [
        (
            "put, flushed to the disk",
            seconds(lambda: [store.put(key(n), chunk(n)) for n in range(chunks)]),
            chunks,
        )
    ]
    some = range(0, chunks, max(1, chunks // 1000))
    rows += [
        ("open", seconds(lambda: DiskStore(folder)), 1),
        ("list keys", seconds(lambda: list(store.keys())), 1),
        ("stats", seconds(store.stats), 1),
        ("look up, there", seconds(lambda: [store.get(key(n)) for n in some]), len(some)),
        ("look up, not there", seconds(lambda: [store.lookup(key(-n - 1)) for n in some]), len(some)),
        (
            "index alone: put",
            seconds(lambda: [store.index.put(store.index.chunk(key(n))) for n in some]),
            len(some),
        ),
        ("index alone: 16 oldest", seconds(lambda: [store.index.oldest(16) for _ in some]), len(some)),
    ]
    store.index.close()
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    fresh = DiskStore(folder)
    rows += [("rebuild the index from the files", seconds(fresh.rebuild), 1)]
    assert fresh.index.num_bytes() == fresh.stats().num_bytes
    one = fresh.size_of(key(0))
    full = DiskStore(folder, quota_bytes=chunks * one)
    number = min(500, chunks // 4)
    first = seconds(lambda: full.put(key(chunks), chunk(chunks)))
    evicting = seconds(lambda: [full.put(key(chunks + 1 + n), chunk(n)) for n in range(number)])
    assert full.stats().num_bytes <= full.quota_bytes
    return [
        *rows,
        ("first put with a quota, which counts the files", first, 1),
        ("put that evicts", evicting, number),
    ]


def bandwidth(folder: Path, megabytes: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes a second of each way to read a chunk of so many megabytes, from the page cache."""
    layers = 16
    tokens = megabytes * 10**6 // (2 * 2 * 64 * layers * dtype.itemsize)
    store, name = DiskStore(folder), key(0)
    kv = chunk(1, tokens, layers, dtype)
    store.put(name, kv)
    path = folder / name[:2] / f"{name}.safetensors"
    torch.save({"ids": kv.token_ids, "keys": kv.keys, "values": kv.values}, folder / "chunk.pt")
    ways = {
        "plain read": path.read_bytes,
        "store": lambda: store.get(name),
        "torch.load": lambda: torch.load(folder / "chunk.pt"),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(8):
        for way, work in ways.items():
            elapsed = seconds(work)
            if number:
                taken[way].append(elapsed)
    return {way: path.stat().st_size / statistics.median(times) for way, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {arguments.chunks:,} chunks\n\n"
        "| operation | number | ms each |\n| --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for operation, taken, number in many(Path(folder), arguments.chunks):
            print(f"| {operation} | {number:,} | {1000 * taken / number:.3g} |")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        index = sum(path.stat().st_size for path in Path(folder).glob("index.sqlite*"))
        print(f"\nThe process grew by {grown / 1024:.0f} MiB; the index has {index / 2**20:.1f} MiB.\n")
    print("| dtype | way | GB/s | of a plain read |\n| --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            speeds = bandwidth(Path(folder), arguments.megabytes, dtype)
        for way, speed in speeds.items():
            print(f"| {dtype} | {way} | {speed / 1e9:.2f} | {100 * speed / speeds['plain read']:.0f} % |")


if __name__ == "__main__":
    main()
