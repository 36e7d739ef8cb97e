"""Run as a process: eight of it at once write and read the same chunks in one folder whose quota holds a
quarter of them. Prints as JSON what they saw, summed.

Usage: python crowd_process.py FOLDER QUOTA CHUNKS TURNS
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections import Counter

import torch

from kvloom.kv import ChunkKV
from kvloom.store import open_store

PROCESSES = 8


def key(number: int) -> str:
    return hashlib.sha256(f"crowd {number}".encode()).hexdigest()


def chunk(number: int) -> ChunkKV:
    """All numbers tell which chunk, layer and tensor it is."""
    keys = tuple(torch.full((2, 16, 8), number * 10.0 + layer) for layer in range(2))
    values = tuple(-layer - 1 for layer in keys)
    return ChunkKV(torch.full((16,), number), keys, values, fingerprint="crowd", start=number)


def is_right(kv: ChunkKV, number: int) -> bool:
    expected = chunk(number)
    pairs = zip((*kv.keys, *kv.values), (*expected.keys, *expected.values), strict=True)
    same = kv.start == number and torch.equal(kv.token_ids, expected.token_ids)
    return same and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def work(url: str, seed: int, chunks: int, turns: int) -> Counter[str]:
    """What this process saw: a chunk that is not there is written, as one that asks would do."""
    store, chance, seen = open_store(url), random.Random(seed), Counter()
    for turn in range(turns):
        # every chunk once, in an order of its own, then some more often than others
        number = (turn * 7 + seed * 61) % chunks if turn < chunks else int(chunks * chance.random() ** 2)
        found = store.lookup(key(number))
        if found.kv is None:
            seen[f"miss: {found.reason}"] += 1
            store.put(key(number), chunk(number))
            seen["written"] += 1
        else:
            seen["right" if is_right(found.kv, number) else "WRONG"] += 1
    seen["rejected"] += len(store.rejections)
    store.flush()
    return seen


def main() -> None:
    url = f"disk:{sys.argv[1]}?quota={sys.argv[2]}"
    chunks, turns = map(int, sys.argv[3:5])
    torch.set_num_threads(1)
    pipes = []
    for seed in range(PROCESSES):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.close(reader)
                os.write(writer, json.dumps(work(url, seed, chunks, turns)).encode())
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writer)
        pipes.append(reader)
    total: Counter[str] = Counter()
    for reader in pipes:
        with open(reader, "rb") as pipe:
            total.update(json.loads(pipe.read() or b'{"died": 1}'))
    for _ in range(PROCESSES):
        os.wait()
    sys.stdout.write(json.dumps(total))


if __name__ == "__main__":
    main()
