"""What compressing costs: bytes by hand, and that each clock sees its own part."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import loom_of

from kvloom.compressors import as_compressor
from kvloom.eval import speed
from kvloom.eval.speed import measure_speed, peak_memory
from kvloom.observe import Observer

if TYPE_CHECKING:
    from kvloom.compressors import Compressor
    from kvloom.loom import Loom

IDS = torch.arange(100) % 256
BYTES_PER_ROW = 3 * 2 * 2 * 16 * 4  # layers, keys and values, kv heads, head dim, float32


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def test_the_peak_is_what_was_held_at_once() -> None:
    def work() -> None:
        first = torch.zeros(1000, 1000)
        second = torch.ones(1000, 500)
        del first, second
        torch.ones(1000, 250)

    assert peak_memory(work, torch.device("cpu")) == 4 * 1500 * 1000


def test_bytes_steps_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    loom = loom_of("llama")
    found = measure_speed(loom, IDS, as_compressor("knorm", {"keep": 0.4}), 5)
    assert found["full_bytes"] == (100 + 5 + speed.WARM_UP) * BYTES_PER_ROW
    assert found["compressed_bytes"] == (40 + 5 + speed.WARM_UP) * BYTES_PER_ROW
    assert found["head_s"] == 0, "no entropy is asked for"
    share = (found["record_s"] + found["compress_s"]) / found["prefill_s"]
    assert found["share"] == found["share_less_head"] == pytest.approx(share)
    assert 0 < found["peak_bytes"] < 100 * BYTES_PER_ROW, "a layer at a time"


def test_each_clock_sees_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms in the head for each block, 30 ms in each layer's score, 40 ms in a step over many rows."""
    loom: Loom = loom_of("llama")
    method = as_compressor("infokv", {"keep": 0.4, "window": 8})
    entropies, score, forward = Observer._entropies, type(method).score, loom.decoder.forward

    def slow_head(self: Observer, states: torch.Tensor) -> object:
        time.sleep(0.02)
        return entropies(self, states)

    def slow_score(self: Compressor, *args: object) -> torch.Tensor:
        time.sleep(0.03)
        return score(self, *args)  # type: ignore[arg-type]

    def slow_step(*args: object, **kwargs: object) -> torch.Tensor:
        time.sleep(0.04 if args[2].layers[0].length > 80 else 0)  # type: ignore[attr-defined]
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Observer, "_entropies", slow_head)
    monkeypatch.setattr(type(method), "score", slow_score)
    monkeypatch.setattr(loom.decoder, "forward", slow_step)
    found = measure_speed(loom, IDS, method, 4)
    assert found["head_s"] >= 0.02
    assert found["compress_s"] >= 0.09
    assert found["full_ms"] >= 40
    assert found["full_ms"] - found["compressed_ms"] > 20
    assert found["share"] - found["share_less_head"] == pytest.approx(found["head_s"] / found["prefill_s"])
