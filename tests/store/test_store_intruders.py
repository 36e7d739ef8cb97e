"""Things in an entry's place that are not files, or only claim to be large."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from kvloom.kv import ChunkKV
from kvloom.store import DiskStore

if TYPE_CHECKING:
    from pathlib import Path

KEY = "ab" * 32


def entry() -> ChunkKV:
    return ChunkKV(torch.arange(3), (torch.ones(1, 3, 2),), (torch.zeros(1, 3, 2),), "f" * 64)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_folder_or_a_pipe_in_an_entrys_place_is_moved_aside(tmp_path: Path, kind: str) -> None:
    store = DiskStore(tmp_path)
    place = tmp_path / KEY[:2] / f"{KEY}.safetensors"
    place.parent.mkdir(parents=True)
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    assert KEY not in store
    if kind == "pipe":
        assert store.get(KEY) is None
        assert len(store.rejections) == 1
    store.put(KEY, entry())
    assert store.get(KEY) is not None


def test_half_a_surrogate_pair_in_the_header_is_damage(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, entry())
    path = tmp_path / KEY[:2] / f"{KEY}.safetensors"
    content = path.read_bytes()
    half = content.replace(b"f" * 64, b"\\ud800" + b"f" * 58)
    assert len(half) == len(content) != content.count(b"f")
    path.write_bytes(half)
    assert store.describe(KEY) is None
    assert "its header is not JSON" in store.rejections[0].reason
    assert (tmp_path / "quarantine" / f"{KEY}.txt").stat().st_mode & 0o777 == 0o600
    assert store.rebuild() == 0


def test_a_folder_that_vanished_comes_back_for_its_owner_alone(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "chunks")
    store.index.close()
    shutil.rmtree(tmp_path / "chunks")
    store.put(KEY, entry())
    assert store.get(KEY) is not None
    for folder in (tmp_path / "chunks", tmp_path / "chunks" / KEY[:2]):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_that_claims_to_be_large_is_rejected_without_reading_it(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, entry())
    os.truncate(tmp_path / KEY[:2] / f"{KEY}.safetensors", 2**42)  # sparse: takes no room
    assert store.get(KEY) is None
    assert "its header says otherwise" in store.rejections[0].reason
