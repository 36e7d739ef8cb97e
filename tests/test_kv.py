from __future__ import annotations

import dataclasses

import pytest
import torch

from kvloom.kv import ChunkKV


def chunk(**changes):
    parts = {
        "token_ids": torch.arange(3),
        "keys": [torch.zeros(2, 3, 4), torch.zeros(1, 3, 8)],
        "values": [torch.zeros(2, 3, 6), torch.zeros(1, 3, 8)],
        "fingerprint": "model-a",
    }
    return ChunkKV(**(parts | changes))


def test_counts():
    kv = chunk()
    assert (kv.num_tokens, kv.num_layers, kv.start) == (3, 2, 0)
    assert kv.num_bytes == 3 * 8 + 4 * 3 * (2 * 4 + 8 + 2 * 6 + 8)
    assert chunk(keys=[torch.zeros(2, 3, 4).bfloat16()] * 2).num_bytes == 24 + 2 * 3 * 8 * 2 + 4 * 3 * (
        2 * 6 + 8
    )


def test_layers_become_tuples_and_fields_are_frozen():
    kv = chunk()
    assert isinstance(kv.keys, tuple)
    assert isinstance(kv.values, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.start = 3  # type: ignore[misc]


def test_chunks_compare_by_identity():
    kv = chunk()
    assert kv != chunk()
    assert len({kv, chunk()}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.zeros(1, 3, dtype=torch.int64)}, r"one-dimensional, got shape \(1, 3\)"),
        ({"token_ids": torch.arange(3).int()}, "token_ids must be torch.int64, got torch.int32"),
        ({"token_ids": torch.zeros(3)}, "token_ids must be torch.int64, got torch.float32"),
        ({"values": [torch.zeros(2, 3, 4)]}, "2 layers of keys but 1 layers of values"),
        ({"start": -1}, "start must not be negative, got -1"),
        (
            {"keys": [torch.zeros(2, 3, 4), torch.zeros(2, 4, 4)]},
            r"layer 1: keys \(2, 4, 4\) should be \(heads, 3, ",
        ),
        ({"values": [torch.zeros(3, 4), torch.zeros(2, 3, 4)]}, r"layer 0: values \(3, 4\) should be"),
        (
            {"token_ids": torch.arange(4)},
            r"layer 0: keys \(2, 3, 4\) should be \(heads, 4, head_dim\); delete",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        chunk(**changes)
