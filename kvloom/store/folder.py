"""The layout of a store's folder: which of its files are entries, and which nobody wants any more."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

from kvloom.store.base import is_key
from kvloom.store.eviction import last_used
from kvloom.store.files import listing
from kvloom.store.index import IndexedChunk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX = ".safetensors"
QUARANTINE = "quarantine"
PINS = "pins"
INDEX = "index.sqlite"
NAMESPACES = "namespaces"

_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9]+\.[0-9a-f]{32}\.tmp")


def entry_name(key: str) -> str:
    """The entry's file, as a path below the folder."""
    return f"{key[:2]}/{key}{SUFFIX}"


def shards(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The folders that entries are in."""
    for shard in listing(folder):
        if len(shard.name) == 2 and is_key(shard.name * 32) and shard.is_dir():
            yield shard


def entries_of(shard: os.DirEntry[str] | Path) -> Iterator[os.DirEntry[str]]:
    """The shard's entries, by key."""
    for entry in listing(shard):
        key = entry.name.removesuffix(SUFFIX)
        if key != entry.name and is_key(key) and key.startswith(shard.name) and entry.is_file():
            yield entry


def by_status(entry: os.DirEntry[str]) -> IndexedChunk | None:
    """What the file system knows of an entry; None if it is gone."""
    try:
        status = os.stat(entry.path)
    except FileNotFoundError:
        return None
    return IndexedChunk(
        key=entry.name.removesuffix(SUFFIX),
        num_bytes=status.st_size,
        created=status.st_mtime,
        last_used=last_used(status),
    )


def sweep(folder: str | os.PathLike[str], after_s: float) -> None:
    """Temporary files older than that are gone from the folder."""
    now = time.time()
    for entry in listing(folder):
        if _TEMPORARY.fullmatch(entry.name):
            # Another process may have swept it, and a folder we cannot write still serves reads.
            with contextlib.suppress(OSError):
                if now - entry.stat().st_mtime >= after_s:
                    os.unlink(entry.path)
