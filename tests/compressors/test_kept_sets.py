"""Which rows each method keeps of a prompt, against its rule written once more over a plain forward."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compressing import compressed, kept
from plain_forward import Plain, best, plain, pooled_by_hand, random_ids
from tiny_models import FAMILIES, build, loom_of
from torch import Tensor

from kvloom.compressors.expected_attention import ExpectedAttention
from kvloom.compressors.pyramidkv import PyramidKV
from kvloom.loom import Loom

if TYPE_CHECKING:
    from collections.abc import Callable

N = 90
KEEP = 0.4
BUDGET = 36


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(N)


@pytest.fixture(scope="module")
def forward(llama_loom: Loom, ids: Tensor) -> Plain:
    return plain(llama_loom, ids)


def by_head(loom: Loom, choose: Callable[[int, int], list[int]]) -> list[list[list[int]]]:
    return [[choose(layer, head) for head in range(2)] for layer in range(loom.decoder.num_layers)]


def snapkv(
    forward: Plain, layer: int, head: int, window: int, kernel: int, pool: str, budget: int, *, num: int = N
) -> list[int]:
    """Per query head: mean over the window, pool over what lies before it; then the mean of the group."""
    before, last = list(range(num - window)), list(range(num - window, num))
    weights = forward.weights[layer][head][:, -window:].mean(1)  # (G, T)
    score = torch.stack([pooled_by_hand(one, kernel, before, pool) for one in weights]).mean(0)
    return best(score, budget - window, before) + last


@pytest.mark.parametrize(("window", "kernel", "pool"), [(16, 5, "avg"), (8, 7, "max"), (20, 1, "avg")])
def test_snapkv(llama_loom: Loom, ids: Tensor, forward: Plain, window: int, kernel: int, pool: str) -> None:
    got = kept(llama_loom, ids, "snapkv", keep=KEEP, window=window, kernel=kernel, pool=pool)
    expected = by_head(
        llama_loom, lambda layer, head: snapkv(forward, layer, head, window, kernel, pool, BUDGET)
    )
    assert got == expected
    assert got[0][0] != got[0][1], "heads differ, or the test could not tell them apart"


def test_pyramidkv_has_falling_budgets_of_the_same_sum(llama_loom: Loom, ids: Tensor, forward: Plain) -> None:
    """cap - window = 28: the last layer gets 28 // 4 = 7, the first 49, the middle one 28, and all the
    window.
    """
    window = 8
    got = kept(llama_loom, ids, "pyramidkv", keep=KEEP, window=window, beta=4)
    budgets = [49 + 8, 28 + 8, 7 + 8]
    assert [len(layer[0]) for layer in got] == budgets
    assert got == by_head(
        llama_loom, lambda layer, head: snapkv(forward, layer, head, window, 5, "avg", budgets[layer])
    )


@pytest.mark.parametrize(
    ("total", "window", "beta", "num_layers", "first", "last"),
    [(100, 20, 20, 5, 156, 4), (100, 20, 20, 32, 156, 4), (61, 1, 7, 4, 112, 8), (160, 20, 20, 5, 180, 100)],
)
def test_pyramidkv_budgets_sum_to_equal_ones(
    total: int, window: int, beta: int, num_layers: int, first: int, last: int
) -> None:
    """Of 200 rows; in the last case 2 * 140 - 7 is more than the 180 there are, and the rest goes to the last
    layers.
    """

    class Rows:
        num_rows = 200

    Rows.num_layers = num_layers  # type: ignore[attr-defined]
    budgets = PyramidKV(window=window, beta=beta).budgets(Rows(), total)  # type: ignore[arg-type]
    assert sum(budgets) == total * num_layers
    assert (budgets[0], budgets[-1]) == (first + window, last + window)
    steps = [a - b for a, b in pairwise(budgets)]
    assert max(steps) - min(steps) <= 1, "equal steps"
    assert min(steps) >= 0


def test_streaming(llama_loom: Loom, ids: Tensor) -> None:
    got = kept(llama_loom, ids, "streaming", keep=KEEP, sinks=3)
    assert got == by_head(llama_loom, lambda *_: [0, 1, 2, *range(N - 33, N)])


def test_knorm(llama_loom: Loom, ids: Tensor, forward: Plain) -> None:
    def choose(layer: int, head: int) -> list[int]:
        norms = forward.keys[layer][head].pow(2).sum(-1).sqrt()
        return best(-norms, BUDGET, list(range(N)))

    assert kept(llama_loom, ids, "knorm", keep=KEEP) == by_head(llama_loom, choose)


def test_keydiff(llama_loom: Loom, ids: Tensor, forward: Plain) -> None:
    def choose(layer: int, head: int) -> list[int]:
        keys = forward.keys[layer][head].double()
        directions = keys / keys.norm(dim=1, keepdim=True)
        anchor = directions.mean(0)
        cosines = directions @ anchor / anchor.norm()
        return best(-cosines, BUDGET, list(range(N)))

    assert kept(llama_loom, ids, "keydiff", keep=KEEP) == by_head(llama_loom, choose)


def test_tova(llama_loom: Loom, ids: Tensor, forward: Plain) -> None:
    def choose(layer: int, _: int) -> list[int]:
        score = forward.weights[layer][:, :, -1].flatten(0, 1).mean(0)
        return [*best(score, BUDGET - 1, list(range(N - 1))), N - 1]

    got = kept(llama_loom, ids, "tova", keep=KEEP)
    assert got == by_head(llama_loom, choose)
    assert got[0][0] == got[0][1], "one set for all heads"


@pytest.mark.parametrize(("share", "recent"), [(0.5, 18), (0.25, 9), (0, 0)])
def test_h2o(llama_loom: Loom, ids: Tensor, forward: Plain, share: float, recent: int) -> None:
    """Column sums of the whole causal attention matrix."""

    def choose(layer: int, head: int) -> list[int]:
        received = forward.weights[layer][head].mean(0).sum(0)
        last = list(range(N - recent, N))
        return best(received, BUDGET - recent, list(range(N - recent))) + last

    got = kept(llama_loom, ids, "h2o", keep=KEEP, recent_share=share)
    assert got == by_head(llama_loom, choose)


def test_expected_attention(llama_loom: Loom, ids: Tensor, forward: Plain) -> None:
    """Llama's rotation written out by hand; queries from the projection, before it."""
    heard: list[Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, output: heard.append(output[0]))
        for layer in llama_loom.model.model.layers
    ]
    plain(llama_loom, ids)
    for hook in hooks:
        hook.remove()
    ahead, half = 40, 8
    frequencies = 10000.0 ** (-torch.arange(half).double() / half)
    turn = torch.zeros(16, 16, dtype=torch.float64)  # column vectors: turn @ q
    for position in range(N, N + ahead):
        angles = position * frequencies
        cos, sin = angles.cos().diag(), angles.sin().diag()
        turn += torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)], 0) / ahead

    def choose(layer: int, head: int) -> list[int]:
        keys = forward.keys[layer][head].double()
        shares = []
        for query_head in (2 * head, 2 * head + 1):
            queries = heard[layer][4:, 16 * query_head : 16 * query_head + 16].double()
            mean, covariance = turn @ queries.mean(0), turn @ queries.T.cov(correction=0) @ turn.T
            expected = [math.exp(k @ mean / 4 + k @ covariance @ k / 32) for k in keys[4:]]
            shares.append(torch.tensor(expected) / sum(expected))
        score = (shares[0] + shares[1] + 2 * 0.01) / 2 * forward.values[layer][head][4:].norm(dim=1)
        return [0, 1, 2, 3] + [4 + row for row in best(score, BUDGET - 4, list(range(N - 4)))]

    got = kept(llama_loom, ids, "expected_attention", keep=KEEP, ahead=ahead, epsilon=0.01)
    assert got == by_head(llama_loom, choose)


def test_expected_attention_is_the_expectation_over_drawn_queries() -> None:
    """The score of six keys against a mean over 400,000 normal queries, without rotation."""
    torch.manual_seed(0)
    mean, root = torch.randn(2, 4), torch.randn(2, 4, 4) / 2

    class Given:
        next_position = 6

        def keys(self, _: int) -> Tensor:
            return torch.linspace(-1, 1.4, 24).view(1, 6, 4).sin()

        def values(self, _: int) -> Tensor:
            return torch.ones(1, 6, 4)

        def rows(self, _: int) -> Tensor:
            return torch.arange(4, 10)  # no sinks

        def query_moments(self, _: int) -> tuple[Tensor, Tensor]:
            return mean, root @ root.transpose(1, 2)

        def scaling(self, _: int) -> float:
            return 0.5

        def rotations(self, positions: Tensor) -> Tensor:
            return torch.eye(4).expand(len(positions), 4, 4)

    score = ExpectedAttention(ahead=3).score(Given(), 0)  # type: ignore[arg-type]
    drawn = mean[:, None] + torch.randn(2, 400_000, 4) @ root.transpose(1, 2)
    weights = (drawn @ Given().keys(0)[0].T / 2).exp().mean(1)
    by_drawing = (weights / weights.sum(1, keepdim=True)).mean(0) * 2
    assert torch.allclose(score[0], by_drawing, rtol=0.02)
    assert score.max() > 1.5 * score.min()


def test_random_is_seeded_uniform_and_spares_the_ends(llama_loom: Loom, ids: Tensor) -> None:
    options: dict[str, Any] = {"keep": KEEP, "first": 2, "last": 10}
    got = kept(llama_loom, ids, "random", **options)
    assert got == kept(llama_loom, ids, "random", seed=0, **options)
    assert got != kept(llama_loom, ids, "random", seed=1, **options)
    counts, short, num_seeds = torch.zeros(40), ids[:40], 60
    for seed in range(num_seeds):
        rows = kept(llama_loom, short, "random", seed=seed, **options)
        heads = [tuple(head) for layer in rows for head in layer]
        assert len(set(heads)) == 6, "every head of every layer has its own rows"
        for head in heads:
            assert len(head) == 16
            counts[list(head)] += 1
    counts /= 6 * num_seeds
    assert counts[:2].tolist() + counts[-10:].tolist() == [1] * 12
    expected, deviation = 4 / 28, math.sqrt(4 / 28 * 24 / 28 / 360)
    assert (counts[2:-10] - expected).abs().max() < 4.5 * deviation


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize("name", ["snapkv", "infokv", "h2o", "expected_attention", "tova"])
def test_one_set_per_kv_head_and_bytes_by_the_share(name: str, heads: int, kv_heads: int) -> None:
    """Query heads in groups of three, one group for all, and none."""
    from byte_tokenizer import ByteTokenizer

    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * heads}
    loom = Loom(build(FAMILIES["llama"] | config), ByteTokenizer(eos_token=None))
    options = {"window": 8} if name in ("snapkv", "infokv") else {}
    talk, done = compressed(loom, random_ids(100), name, keep=0.4, **options)
    per_row = 3 * kv_heads * (16 + 16) * 4  # layers, heads, key and value, float32
    assert (done.bytes_before, done.bytes_after) == (100 * per_row, 40 * per_row)
    assert talk.cache.num_bytes == 40 * per_row
    for layer in range(3):
        assert talk.cache.keys(layer).shape == (kv_heads, 40, 16)
        own = {tuple(rows.tolist()) for rows in talk.cache.layers[layer].rows}
        assert (len(own) == 1) == (name == "tova" or kv_heads == 1)


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2", "qwen3", "phi", "llama-yarn"])
def test_attention_has_the_models_sinks_soft_cap_norms_and_scaling(family: str) -> None:
    loom, ids = loom_of(family), random_ids(N)
    forward = plain(loom, ids)
    got = kept(loom, ids, "snapkv", keep=KEEP, window=8)
    num_heads = len(forward.keys[0])
    assert got == [
        [snapkv(forward, layer, head, 8, 5, "avg", BUDGET) for head in range(num_heads)] for layer in range(3)
    ]
