"""Forks eight processes that put and get 120 chunks in a store with room for 40; prints how many reads there
were, how many hits, how many of those were wrong, and how many entries were rejected.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys

import torch

from kvloom.kv import ChunkKV
from kvloom.store import DiskStore
from kvloom.store.format import encode

WORKERS, TURNS, CHUNKS, ROOM = 8, 50, 120, 40


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunk(number: int) -> ChunkKV:
    layers = (torch.full((2, 8, 4), float(number)),)
    return ChunkKV(torch.full((8,), number), layers, layers, fingerprint="model-a")


def work(path: str, worker: int) -> tuple[int, int, int, int]:
    one = sum(len(piece) for piece in encode(key(0), chunk(0)))
    store, rng = DiskStore(path, quota_bytes=ROOM * one), random.Random(worker)
    hits = wrong = 0
    for turn in range(TURNS):
        number = rng.randrange(CHUNKS)
        store.put(key(number), chunk(number))
        wanted = number if turn % 2 else rng.randrange(CHUNKS)
        kv = store.get(key(wanted))
        if kv is not None:
            hits += 1
            layers = (*kv.keys, *kv.values)
            wrong += not all(bool((layer == wanted).all()) for layer in layers)
    return TURNS, hits, wrong, len(store.rejections)


def main() -> None:
    pipes = []
    for worker in range(WORKERS):
        reader, writer = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                os.write(writer, " ".join(map(str, work(sys.argv[1], worker))).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        pipes.append(reader)
    results = []
    for pipe in pipes:
        with open(pipe) as file:
            results.append([int(number) for number in file.read().split()])
    for _ in pipes:
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    sys.stdout.write(" ".join(str(sum(column)) for column in zip(*results, strict=True)))


if __name__ == "__main__":
    main()
