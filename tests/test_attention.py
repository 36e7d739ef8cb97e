from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvloom import attention
from kvloom.attention import ByPosition, Heads, Packed, Recorded, attend_last

H, G, D = 2, 3, 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])
HEADS = [Heads(0.3), Heads(0.3, sinks=SINKS), Heads(0.3, softcap=2.0)]


def tensors(num_rows: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + num_keys)
    sizes = (H * G, num_rows, D), (H, num_keys, D), (H, num_keys, D)
    return tuple(torch.randn(size, generator=generator) * 2 for size in sizes)  # type: ignore[return-value]


def reference(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, heads: Heads) -> Tensor:
    """The slow clear version: one query, one head at a time."""
    output = torch.zeros(H * G, query.shape[1], D)
    for head in range(H * G):
        for row in range(query.shape[1]):
            visible = sees[head // G, row].nonzero().flatten()
            scores = keys[head // G, visible] @ query[head, row] * heads.scaling
            if heads.softcap is not None:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if heads.sinks is None else heads.sinks[head].exp())
            output[head, row] = (weights / total) @ values[head // G, visible]
    return output


def sees(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    return (key_positions.expand(H, -1)[:, None, :] <= query_positions[None, :, None]).expand(H, -1, -1)


@pytest.mark.parametrize("heads", HEADS, ids=["plain", "sinks", "softcap"])
@pytest.mark.parametrize(
    ("query_positions", "key_positions"),
    [
        (torch.arange(150), torch.arange(150)),  # a whole prefill
        (torch.arange(3, 150, 7), torch.arange(150)),  # chosen rows
        (
            torch.cat([torch.arange(3, 140, 5), torch.arange(140, 150)]),
            torch.arange(150),
        ),  # rows and question
        (torch.arange(149, 0, -2), torch.arange(150)),  # rows out of order
        (torch.tensor([149]), torch.arange(150)),  # a decode step
        (torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2, 0, 1, 2, 5, 6, 7])),  # chunks at the same positions
        (torch.arange(100), torch.arange(100).flip(0)),  # same tokens, other places
        (torch.tensor([40, 41]), torch.stack([torch.arange(0, 42), torch.arange(0, 84, 2)])),  # heads differ
    ],
    ids=["whole", "rows", "rows+question", "descending", "decode", "overlapping", "reversed", "per-head"],
)
def test_a_query_sees_the_keys_at_or_before_its_position(
    query_positions: Tensor, key_positions: Tensor, heads: Heads
) -> None:
    query, keys, values = tensors(len(query_positions), key_positions.shape[-1])
    expected = reference(query, keys, values, sees(query_positions, key_positions), heads)
    plan = ByPosition(query_positions, lambda _: key_positions)
    assert torch.allclose(plan.attend(0, query, keys, values, heads), expected, atol=1e-5)
    heard: list[Tensor] = []
    recorded = Recorded(plan, frozenset([0]), lambda _, weights: heard.append(weights))
    assert torch.allclose(recorded.attend(0, query, keys, values, heads), expected, atol=1e-5)
    weights = torch.cat(heard, 1)
    assert torch.allclose((weights.unflatten(0, (H, G)) @ values[:, None]).flatten(0, 1), expected, atol=1e-5)
    if heads.sinks is None:
        assert torch.allclose(weights.sum(-1), torch.ones(H * G, len(query_positions)))


def test_blocks_do_the_arithmetic_of_a_causal_mask_not_of_a_dense_one() -> None:
    """15 % of 4,096 rows spread evenly: half the scores of a dense mask, and the block's own width."""
    rows = torch.arange(0, 4096, 7)
    cuts = ByPosition(rows, lambda _: torch.arange(4096))._blocks(torch.arange(4096))
    computed = sum((cut.last - cut.first) * cut.num_keys for cut in cuts)
    needed = int((rows + 1).sum())
    assert [cut.first for cut in cuts] == list(range(0, len(rows), attention.ROWS_PER_BLOCK))
    assert needed <= computed < 1.15 * needed < 0.6 * len(rows) * 4096


def test_the_listener_hears_rows_in_order_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_PER_BLOCK", H * G * 50 * 4)
    query, keys, values = tensors(10, 50)
    whole = attention.attention_weights(query, keys, torch.ones(10, 50, dtype=torch.bool), HEADS[0])
    heard: list[Tensor] = []
    plan = Recorded(
        ByPosition(torch.full((10,), 99), lambda _: torch.arange(50)),
        frozenset([3]),
        lambda layer, w: heard.append(w),
    )
    plan.attend(2, query, keys, values, HEADS[0])
    assert heard == []
    plan.attend(3, query, keys, values, HEADS[0])
    assert [block.shape[1] for block in heard] == [4, 4, 2]
    assert torch.allclose(torch.cat(heard, 1), whole)


@pytest.mark.parametrize("heads", HEADS, ids=["plain", "sinks", "softcap"])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 8, 9])
def test_attend_last_aligns_the_queries_to_the_end(num_rows: int, heads: Heads) -> None:
    query, keys, values = tensors(num_rows, 9)
    expected = reference(query, keys, values, sees(torch.arange(9 - num_rows, 9), torch.arange(9)), heads)
    assert torch.allclose(attend_last(query, keys, values, heads), expected, atol=1e-5)


def test_no_mask_is_built_where_most_keys_have_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_mask", lambda *_: pytest.fail("a dense mask doubles the arithmetic"))
    query, keys, values = tensors(5, 9)
    attend_last(query, keys, values, HEADS[0])


@pytest.mark.parametrize("heads", HEADS, ids=["plain", "sinks", "softcap"])
def test_packed_sequences_see_the_header_and_themselves(heads: Heads) -> None:
    lengths, num_header = [3, 1, 5], 4
    query, keys, values = tensors(9, 13)
    visible = torch.zeros(9, 13, dtype=torch.bool)
    visible[:, :num_header] = True
    first = 0
    for length in lengths:
        own = slice(num_header + first, num_header + first + length)
        visible[first : first + length, own] = torch.ones(length, length, dtype=torch.bool).tril()
        first += length
    expected = reference(query, keys, values, visible.expand(H, -1, -1), heads)
    assert torch.allclose(Packed(lengths).attend(0, query, keys, values, heads), expected, atol=1e-5)
