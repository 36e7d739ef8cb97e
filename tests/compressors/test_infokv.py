"""InfoKV against its equations written once more, option by option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from compressing import compressed, kept, prefilled
from plain_forward import (
    Plain,
    best,
    drift_by_hand,
    entropy_by_hand,
    plain,
    pooled_by_hand,
    random_ids,
)
from tiny_models import FAMILIES, build
from torch import Tensor

from kvloom import observe
from kvloom.cache_probe import CacheProbe
from kvloom.compressors.base import in_proportion
from kvloom.compressors.infokv import InfoKV
from kvloom.errors import MethodError
from kvloom.loom import Loom

N, BUDGET, WINDOW = 120, 48, 16
DEFAULT: dict[str, Any] = {"keep": 0.4, "window": WINDOW, "k": 20}


@pytest.fixture(scope="module")
def loom() -> Loom:
    """A llama whose final norm turns the states, as trained ones do: with weights of 1 it would not."""
    model = build(FAMILIES["llama"])
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3)
    return Loom(model, ByteTokenizer(eos_token=None))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(N, seed=5)


@pytest.fixture(scope="module")
def forward(loom: Loom, ids: Tensor) -> Plain:
    return plain(loom, ids)


def information(forward: Plain, *, tau: float = 1.0, k: int = 20, **options: Any) -> Tensor:
    """E (L, T) of Eq. 7."""
    entropy = entropy_by_hand(forward.logits, k, renormalize=options.get("renormalize", True))
    if options.get("normalize"):
        entropy = entropy / math.log(k)
    is_normed = options.get("drift") == "normed"
    drift = drift_by_hand(forward.states, forward.normed if is_normed else forward.states[-1])
    if is_normed:
        drift[-1] = 0
    return (drift + tau) * entropy


def score_by_hand(forward: Plain, layer: int, **options: Any) -> Tensor:
    """S (H, T) of Eq. 8."""
    alpha, kernel = options.get("alpha", 0.9), options.get("kernel", 9)
    before = list(range(N - WINDOW))
    seen = forward.weights[layer][:, :, -WINDOW:]  # (H, G, W, T)
    seen = seen.sum(2) if options.get("reduce") == "sum" else seen.mean(2)
    if options.get("heads") == "layer":
        seen = seen.mean((0, 1), keepdim=True).expand(2, 1, -1)
    attention = torch.stack(
        [torch.stack([pooled_by_hand(one, kernel, before) for one in head]).mean(0) for head in seen]
    )
    shares = information(forward, **options)[layer].double().softmax(0).float()
    return alpha * attention + (1 - alpha) * shares


def kept_by_hand(forward: Plain, budgets: list[int] | None = None, **options: Any) -> list[list[list[int]]]:
    window = list(range(N - WINDOW, N))
    return [
        [
            best(score, (budgets or [BUDGET] * 3)[layer] - WINDOW, list(range(N - WINDOW))) + window
            for score in score_by_hand(forward, layer, **options)
        ]
        for layer in range(3)
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.5},
    {"alpha": 0.0},
    {"tau": 0.0},
    {"tau": 1.5},
    {"k": 5},
    {"kernel": 3},
    {"renormalize": False},
    {"normalize": True},
    {"drift": "normed"},
    {"heads": "layer"},
    {"heads": "kv"},
    {"reduce": "sum"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_keeps_what_its_equations_say(
    loom: Loom, ids: Tensor, forward: Plain, options: dict[str, Any]
) -> None:
    got = kept(loom, ids, InfoKV(**DEFAULT | options))
    assert got == kept_by_hand(forward, **options)
    if options and options != {"heads": "kv"}:
        assert got != kept_by_hand(forward), "the option changes the kept set, or the test could not fail"


def test_the_score_itself_and_its_scale(loom: Loom, ids: Tensor, forward: Plain) -> None:
    """Kept sets could agree by luck; so do the numbers."""
    method = InfoKV(**DEFAULT)
    talk = prefilled(loom, ids, method)
    probe = CacheProbe(talk.cache, talk.observer)
    for layer in range(3):
        by_hand = score_by_hand(forward, layer)
        assert torch.allclose(method.score(probe, layer), by_hand, rtol=1e-4, atol=1e-7)


def test_budgets_by_information(loom: Loom, ids: Tensor, forward: Plain) -> None:
    """Eqs. 9 and 10: layers share three equal budgets by the sum of E over their tokens."""
    options = {"tau": 0.2, "budget": "adaptive"}
    sums = information(forward, tau=0.2).sum(1).double()
    exact = 3 * BUDGET * sums / sums.sum()
    talk, done = compressed(loom, ids, InfoKV(**DEFAULT | options))
    assert sum(done.kept) == 3 * BUDGET
    assert all(abs(number - float(share)) < 1 for number, share in zip(done.kept, exact, strict=True))
    assert done.kept[0] > done.kept[2] + 5, "the last layer has no drift"
    by_head = [[sorted(head.tolist()) for head in layer.rows] for layer in talk.cache.layers]
    assert by_head == kept_by_hand(forward, done.kept, tau=0.2)


def test_shares_are_whole_and_what_one_cannot_hold_goes_to_the_others() -> None:
    assert in_proportion(30, [1.0, 1.0, 1.0], most=20) == [10, 10, 10]
    assert in_proportion(30, [2.0, 1.0, 0.0], most=20) == [20, 10, 0]
    assert in_proportion(30, [9.0, 1.0, 1.0], most=20) == [20, 5, 5]
    assert in_proportion(45, [9.0, 1.0, 0.0], most=20) == [20, 20, 5]
    assert in_proportion(10, [0.0, 0.0, 0.0], most=20) == [4, 3, 3]
    assert in_proportion(60, [3.0, 2.0, 1.0], most=20) == [20, 20, 20]


def test_alpha_1_is_snapkv(loom: Loom, ids: Tensor) -> None:
    got = kept(loom, ids, InfoKV(**DEFAULT | {"alpha": 1, "kernel": 5}))
    assert got == kept(loom, ids, "snapkv", keep=0.4, window=WINDOW, kernel=5)
    assert got != kept(loom, ids, InfoKV(**DEFAULT | {"kernel": 5}))


def test_constant_entropy_leaves_the_order_of_attention(loom: Loom, ids: Tensor) -> None:
    """In the last layer, where the drift is 0, and with a constant drift everywhere."""
    method = InfoKV(**DEFAULT | {"alpha": 0.5})
    talk = prefilled(loom, ids, method)
    talk.cache.side["entropy"][:] = 2.5
    talk.cache.side["drift"][:2] = 0.7
    talk.compress()
    rows = [[sorted(head.tolist()) for head in layer.rows] for layer in talk.cache.layers]
    assert rows == kept(loom, ids, InfoKV(**DEFAULT | {"alpha": 1}))


def test_information_lifts_a_row_that_attention_would_drop(loom: Loom, ids: Tensor) -> None:
    talk = prefilled(loom, ids, InfoKV(**DEFAULT))
    dropped = sorted(set(range(N)) - set(kept(loom, ids, InfoKV(**DEFAULT))[1][0]))[7]
    talk.cache.side["entropy"][dropped] = 9.0
    talk.compress()
    for layer in talk.cache.layers:
        assert all(dropped in head.tolist() for head in layer.rows)


def test_the_mean_does_not_depend_on_the_size_of_the_window(loom: Loom, ids: Tensor) -> None:
    """The window twice over, by the same queries at the same positions: no score changes. A sum would."""
    method, doubled = InfoKV(**DEFAULT), InfoKV(**DEFAULT | {"window": 2 * WINDOW})
    probe = Repeating(prefilled(loom, ids, method).observer.cache, prefilled(loom, ids, method))
    for layer in range(3):
        once, twice = method.score(probe, layer), doubled.score(probe, layer)
        assert torch.allclose(once, twice, rtol=1e-5, atol=1e-8)


class Repeating(CacheProbe):
    """A window of 2 W queries is the last W twice; the window's rows are those of the smaller one."""

    def __init__(self, _: Any, talk: Any) -> None:
        super().__init__(talk.cache, talk.observer)

    def window(self, layer: int, size: int, *, support: Any = "all") -> Tensor:
        last = super().window(layer, WINDOW, support=support)
        return last.repeat(1, 1, size // WINDOW, 1)

    def is_last(self, layer: int, size: int) -> Tensor:
        return super().is_last(layer, WINDOW)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_a_prompt_in_blocks_keeps_the_same_rows(
    loom: Loom, ids: Tensor, forward: Plain, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "TOKENS_PER_BLOCK", block)
    monkeypatch.setattr(observe, "ROWS_PER_HEAD_BLOCK", 5)
    assert kept(loom, ids, InfoKV(**DEFAULT)) == kept_by_hand(forward)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt-oss", "qwen3-moe"])
def test_heads_with_scale_and_soft_cap_and_experts(family: str, ids: Tensor) -> None:
    """Entropies come from the logits as the model makes them, scaled and capped."""
    config = FAMILIES[family] | {"num_key_value_heads": 2}
    if family == "gemma2":
        config["final_logit_softcapping"] = 3.0
    loom = Loom(build(config), ByteTokenizer(eos_token=None))
    forward = plain(loom, ids)
    assert kept(loom, ids, InfoKV(**DEFAULT)) == kept_by_hand(forward)


def test_normalizing_knows_the_vocabulary(loom: Loom, ids: Tensor, forward: Plain) -> None:
    """k = min(k, V): with k above 264, H is over all tokens and at most ln 264."""
    method = InfoKV(**DEFAULT | {"k": 100_000, "normalize": True, "alpha": 0.0})
    got = kept(loom, ids, method)
    assert got == kept_by_hand(forward, alpha=0.0, k=264, normalize=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.1}, "alpha must lie from 0 to 1"),
        ({"alpha": float("nan")}, "alpha must lie from 0 to 1"),
        ({"tau": -0.1}, "tau must be 0 or a positive number"),
        ({"tau": float("inf")}, "tau must be 0 or a positive number"),
        ({"k": 0}, "k is a whole number of at least 1"),
        ({"window": 0}, "window is a whole number of at least 1"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"drift": "cosine"}, "drift must be one of residual, normed"),
        ({"heads": "query"}, "heads must be one of auto, kv, layer"),
        ({"reduce": "max"}, "reduce must be one of mean, sum"),
        ({"support": "candidates"}, "support must be one of auto, all"),
        ({"budget": "pyramid"}, "budget must be one of uniform, adaptive"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=f"infokv: {message}"):
        InfoKV(**options)
