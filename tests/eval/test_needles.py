"""Heatmaps of needles, their numbers read off the drawings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from made_results import Samples, words, write

from kvloom.eval.report import Report, report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS = ("infoflow:layers=2", "infoflow:layers=10", "infoflow:layers=3")


def cells(number: Callable[[int, int, int], dict[str, Any]]) -> Samples:
    """A sample for each length, depth and turn, with the numbers that the function says."""
    places = [(length, depth, turn) for length in (1000, 2000) for depth in (0, 50) for turn in (0, 1)]
    return {
        f"{length}_{depth}_{turn}": {"kl": 1.0, "kind": f"length={length},depth={depth}"}
        | number(length, depth, turn)
        for length, depth, turn in places
    }


def numbers(svg: str, count: int) -> list[float]:
    """What is written into the first cells."""
    return [float(word) for word in words(svg) if re.fullmatch(r"-?\d\.\d\d", word)][:count]


def made(tmp_path: Path, methods: dict[str, Samples]) -> Report:
    return report([write(tmp_path / "a", {"needle": methods})])


def test_heatmaps_show_contains_where_all_have_it_and_f1_before_kl(tmp_path: Path) -> None:
    both = cells(lambda length, depth, turn: {"f1": 0.1, "contains": float(turn and depth == 50)})
    f1 = cells(lambda length, depth, turn: {"f1": 0.1})
    all_have = made(tmp_path / "1", {"none": both, "infoflow": both}).plots["heatmap-needle"]
    assert numbers(all_have, 4) == [0, 0, 0.5, 0.5]
    assert "share of answers that contain the needle" in words(all_have)
    some_have = made(tmp_path / "2", {"none": both, "infoflow": f1}).plots["heatmap-needle"]
    assert numbers(some_have, 4) == [0.1] * 4
    assert "F1" in words(some_have)


def test_layers_by_depth(tmp_path: Path) -> None:
    share = {"infoflow:layers=2": 0.2, "infoflow:layers=10": 1.0, "infoflow:layers=3": 0.3}
    methods = {
        label: cells(lambda _, depth, turn, share=share: {"contains": share * turn * (1 + depth / 50) / 2})
        for label, share in share.items()
    }
    methods["infoflow"] = cells(lambda *_: {"contains": 1.0})
    drawn = made(tmp_path, methods).plots["layer-map-needle"]
    # depths down, layers across in their order, each the mean over two lengths and two turns
    assert numbers(drawn, 6) == [0.05, 0.07, 0.25, 0.1, 0.15, 0.5]
    assert words(drawn)[:3] == ["2", "3", "10"]
    assert "layer that scores" in words(drawn)
    assert "infoflow ratio=0.15" in words(drawn)


def test_layers_by_depth_without_answers_show_the_gap_closed(tmp_path: Path) -> None:
    none = cells(lambda length, depth, turn: {"kl": length / 1000 if depth else 0.0})
    half = cells(lambda length, depth, turn: {"kl": length / 2000})
    drawn = made(tmp_path / "1", {"none": none, **dict.fromkeys(LAYERS, half)}).plots["layer-map-needle"]
    assert numbers(drawn, 3) == [0.5] * 3, "at depth 0 there is no gap, so that line is not there"
    assert "share of the KL gap closed" in words(drawn)
    assert "0 %" not in words(drawn)
    alone = made(tmp_path / "2", dict.fromkeys(LAYERS, half)).plots["layer-map-needle"]
    assert numbers(alone, 3) == [0.75] * 3, "without none the KL itself"
    assert "KL to full prefill, nats per token" in words(alone)


def test_fewer_layers_or_other_differences_are_no_picture(tmp_path: Path) -> None:
    sample = cells(lambda *_: {})
    two = made(tmp_path / "1", dict.fromkeys((*LAYERS[:2], "infoflow:layers=3,4"), sample))
    other = made(tmp_path / "2", dict.fromkeys((*LAYERS[:2], "infoflow:layers=3,ratio=0.3"), sample))
    for found in (two, other):
        assert "heatmap-needle" in found.plots
        assert "layer-map-needle" not in found.plots
