"""The arithmetic of the bounds, by hand and against the FLOPs that torch counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import DOCUMENTS, FAMILIES, NUM_LAYERS, QUESTION, build, loom_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kvloom.bench.bound import Shapes, Work, first_token, forward, scoring, step_seconds
from kvloom.bench.index import works_of
from kvloom.bench.rates import Rates
from kvloom.errors import MethodError
from kvloom.hf import Decoder
from kvloom.selectors import CacheBlend, Full, InfoFlow, NoRecompute

if TYPE_CHECKING:
    from collections.abc import Callable

LINEAR = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96  # q, k, v, o; gate, up, down
PAIR = 4 * (16 + 16)
KV = 2 * (16 + 16)
HEAD = 64 * 264


class Machine:
    """A machine with round numbers; fewer rows are slower."""

    read, copy = 1e3, 5e2

    def matmul(self, rows: int) -> float:
        return 1e6 if rows > 1 else 1e4


def counted(work: Callable[[], Any]) -> tuple[int, int]:
    """FLOPs that torch counts: of linear maps, and of attention, dense; on a CPU it sees the plainest
    kernel only.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    return linear, sum(n for op, n in counts.items() if str(op) == "aten.bmm")


def test_shapes_are_read_off_the_model() -> None:
    shapes = Shapes.of(loom_of("llama").decoder)
    assert shapes.linear == (LINEAR,) * NUM_LAYERS
    assert (shapes.pair, shapes.kv, shapes.head) == ((PAIR,) * NUM_LAYERS, (KV,) * NUM_LAYERS, HEAD)
    assert shapes.kv_bytes(10) == 10 * NUM_LAYERS * KV * 4
    assert shapes.kv_bytes(10, 1) == 10 * KV * 4
    assert shapes.weight_bytes == 4 * (NUM_LAYERS * LINEAR + HEAD)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm4", "gemma"])
def test_full_prefill_is_what_torch_counts(family: str) -> None:
    loom = loom_of(family)
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    shapes, num = Shapes.of(loom.decoder), prompt.num_tokens
    work = forward(shapes, range(num))
    linear, attention = counted(lambda: loom.full_prefill(prompt))
    assert work.linear_flops + work.head_flops == linear
    dense = 2 * num * num * sum(shapes.pair)
    assert dense <= attention < 1.01 * dense, "and a little for the rotary embedding"
    assert work.attention_flops == dense * (num + 1) // (2 * num), "the causal half"


def test_recompute_and_scoring_are_what_torch_counts() -> None:
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    loom.index(DOCUMENTS)
    shapes, selector = Shapes.of(loom.decoder), InfoFlow(ratio=0.2, layers="0-0.6")
    cache = loom.splice(prompt)
    rows = loom.select(cache, prompt, selector)
    works = first_token(shapes, selector, prompt, rows.tolist(), from_disk=True, is_scored=True)
    linear, attention = counted(lambda: loom.select(cache, prompt, selector))
    assert works["score"].linear_flops == linear == 2 * len(prompt.question_ids) * 2 * LINEAR
    assert works["score"].attention_flops <= attention
    linear, attention = counted(lambda: loom.recompute(cache, rows, prompt))
    assert works["recompute"].linear_flops + works["recompute"].head_flops == linear
    assert works["recompute"].attention_flops <= attention
    held = len(prompt.context_ids) * NUM_LAYERS * KV * 4
    assert (works["load"].loaded_bytes, works["splice"].moved_bytes) == (held, 2 * held)
    assert (
        first_token(shapes, selector, prompt, [], from_disk=False, is_scored=True)["load"].loaded_bytes == 0
    )
    assert first_token(shapes, selector, prompt, [], from_disk=True, is_scored=False)["score"] == Work()
    assert set(first_token(shapes, Full(), prompt, [], from_disk=False, is_scored=True)) == {"recompute"}


def test_what_methods_compute_to_choose() -> None:
    loom = loom_of("llama")
    prompt, shapes = loom.prompt(QUESTION, DOCUMENTS), Shapes.of(loom.decoder)
    num_context = len(prompt.context_ids)
    assert scoring(shapes, NoRecompute(), prompt) == Work()
    blend = scoring(shapes, CacheBlend(), prompt)
    assert (blend.linear_flops, blend.rows) == (2 * num_context * 2 * LINEAR, num_context)
    asked = scoring(shapes, InfoFlow(query="question", layers=(1,)), prompt)
    assert asked.rows == prompt.question_span.stop
    assert asked.linear_flops == 2 * asked.rows * 2 * LINEAR


def test_seconds_by_hand() -> None:
    shapes = Shapes(linear=(10, 20), pair=(3, 4), kv=(2, 2), head=50, itemsize=4)
    work = forward(shapes, [0, 4])  # two rows that see 1 and 5 keys
    assert (work.linear_flops, work.attention_flops, work.head_flops) == (2 * 2 * 30, 2 * 6 * 7, 100)
    assert work.kv_read_bytes == 5 * 4 * 4
    assert work.flops == 120 + 84 + 100
    by_bytes = 80 / 1e3  # more than 84 / 1e6: reading the KV takes longer than attending to it
    assert work.seconds(Machine()) == pytest.approx(120 / 1e6 + 100 / 1e4 + by_bytes)
    assert Work(moved_bytes=100, loaded_bytes=50).seconds(Machine()) == pytest.approx(0.2 + 0.05)
    assert forward(shapes, []).seconds(Machine()) == 0
    assert step_seconds(shapes, 3, Machine()) == pytest.approx((4 * 80 + 3 * 4 * 4) / 1e3)


def test_packed_chunks_and_single_ones_by_hand() -> None:
    shapes = Shapes(linear=(10,), pair=(3,), kv=(2,), head=50, itemsize=4)
    works = works_of(shapes, [2, 1], 1)
    assert [work.head_flops for work in works["transformers"]] == [100, 100]
    assert [work.linear_flops for work in works["transformers"]] == [40, 20]
    header, pack = works["index"]
    assert (header.linear_flops, header.attention_flops, header.head_flops) == (20, 6, 0)
    assert (pack.rows, pack.linear_flops) == (3, 60)
    assert pack.attention_flops == 2 * 3 * ((2 + 3) + 2), "each sees the header and its own chunk"
    assert [work.rows for work in works_of(shapes, [2], 0)["index"]] == [2], "no header, no pass over it"


def test_experts_are_refused() -> None:
    with pytest.raises(MethodError, match="computes with more than linear maps"):
        Shapes.of(Decoder(build(FAMILIES["gpt-oss"])))


def test_rates_are_medians_of_samples_of_what_this_machine_does() -> None:
    rates = Rates(loom_of("llama").decoder)
    for _ in range(3):
        rates.sample([1, 40])
    assert rates.matmul(40) > rates.matmul(1) > 0
    assert set(rates.as_dict()["matmul_flops_s"]) == {"1", "40"}
    assert rates.read > 1e8
    assert rates.copy > 1e8
    x, w = torch.randn(400, 64), torch.randn(64, 96)
    with FlopCounterMode(display=False) as counter:
        x @ w
    assert counter.get_total_flops() == 2 * 400 * 64 * 96, "a multiplication and an addition are two"
