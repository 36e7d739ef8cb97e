"""Small chunks with known contents."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch

from kvloom.kv import ChunkKV

if TYPE_CHECKING:
    from collections.abc import Callable

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _make_chunk(
    value: float = 1.0, *, tokens: int = 3, layers: int = 2, dtype: torch.dtype = torch.float32
) -> ChunkKV:
    """Layer i has keys `value` + i and values -`value` - i; 2 heads, head dim 4."""
    keys = [torch.full((2, tokens, 4), value + layer).to(dtype) for layer in range(layers)]
    return ChunkKV(
        torch.arange(tokens), tuple(keys), tuple(-layer for layer in keys), fingerprint="model-a", start=7
    )


def _assert_same(got: ChunkKV | None, expected: ChunkKV) -> None:
    """Equal to the last bit, NaN payloads included."""
    assert got is not None
    assert (got.fingerprint, got.start) == (expected.fingerprint, expected.start)
    assert got.num_layers == expected.num_layers
    assert got.compressor == expected.compressor
    assert (got.rows is None) == (expected.rows is None)
    for ours, theirs in zip(got.rows or (), expected.rows or (), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == torch.int32
    assert got.token_ids.dtype == torch.int64
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    pairs = zip((*got.keys, *got.values), (*expected.keys, *expected.values), strict=True)
    for ours, theirs in pairs:
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        bits = BITS[theirs.dtype]
        assert torch.equal(ours.view(bits), theirs.contiguous().view(bits))


@pytest.fixture(scope="session")
def make_chunk() -> Callable[..., ChunkKV]:
    return _make_chunk


@pytest.fixture(scope="session")
def assert_same() -> Callable[[ChunkKV | None, ChunkKV], None]:
    return _assert_same


@pytest.fixture(scope="session")
def make_key() -> Callable[[int], str]:
    return lambda number: hashlib.sha256(str(number).encode()).hexdigest()
