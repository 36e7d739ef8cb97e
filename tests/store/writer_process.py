"""Forks a child for each line ``MODE PATH`` on stdin: a test can kill writers without importing torch anew.

Prints the child's id, and ``gone`` with its exit code when it has ended. Modes: ``loop`` puts chunks 0 to 3
until killed; ``stall`` stops within its first fsync; ``race`` forks two, which put different chunks under one
key 25 times each.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch

from kvloom.kv import ChunkKV
from kvloom.store import DiskStore


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunk(number: int) -> ChunkKV:
    """Half a megabyte of `number`."""
    layers = tuple(torch.full((4, 256, 32), float(number)) for _ in range(2))
    return ChunkKV(torch.arange(256), layers, layers, fingerprint="model-a")


CHUNKS = [chunk(number) for number in range(4)]


def work(mode: str, path: str, worker: int) -> None:
    store = DiskStore(path)
    if mode == "race":
        for _ in range(25):
            store.put(key(0), CHUNKS[worker])
    if mode == "stall":
        os.fsync = stall
    if mode in {"loop", "stall"}:
        for number in range(10**6):
            store.put(key(number % 4), CHUNKS[number % 4])


def stall(_: int) -> None:
    sys.stdout.write("stalled\n")
    sys.stdout.flush()
    time.sleep(60)


def main() -> None:
    for line in sys.stdin:
        mode, path = line.split()
        children = []
        for worker in range(2 if mode == "race" else 1):
            child = os.fork()
            if child == 0:
                try:
                    work(mode, path, worker)
                    os._exit(0)
                finally:
                    os._exit(1)
            children.append(child)
        sys.stdout.write(f"{children[0]}\n")
        sys.stdout.flush()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(f"gone {max(statuses)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
