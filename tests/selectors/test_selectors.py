"""The contract of every selector, and each method row by row on a case small enough to compute by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import DOCUMENTS, FLOAT32, QUESTION, difference
from torch import Tensor

import kvloom.selectors
from kvloom.errors import MethodError
from kvloom.probe import Probe
from kvloom.selectors import CacheBlend, Epic, InfoFlow, NoRecompute, Random, Selector, select, selectors
from kvloom.selectors.infoflow import resolve_layers
from kvloom.trace import Trace

if TYPE_CHECKING:
    from kvloom.loom import Loom


@dataclass
class FakeProbe:
    """Two exact rows, then chunks of 6 and 4 rows; attention given by hand."""

    weights: Tensor | None = None  # (layers, T): what `reduced` returns
    num_rows: int = 12
    num_layers: int = 4

    def __post_init__(self) -> None:
        self.spans = [range(2, 8), range(8, 12)]
        self.exact = torch.arange(self.num_rows) < 2
        self.asked: list[Any] = []
        self.groups: list[list[int]] = []

    def reduced(self, *reductions: str, geometry: str, layers: tuple[int, ...], query: str) -> Tensor:
        self.asked.append((reductions, geometry, layers, query))
        assert self.weights is not None
        return self.weights[list(layers)][None].expand(len(reductions), -1, -1)


def chosen(selector: Selector, probe: FakeProbe) -> list[int]:
    return select(selector, probe).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(selectors))
def test_contract(name: str, llama_loom: Loom) -> None:
    """Shape, budget, determinism, ascending rows, an untouched cache, no exact row."""
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    cache = llama_loom.splice(prompt)
    before = [cache.keys(layer).clone() for layer in range(3)]
    selector = selectors[name]()
    probe = Probe(llama_loom.decoder, cache, prompt.question_ids, prompt.question_span)
    score = selector.score(probe)
    assert score.shape == (cache.num_rows,)
    assert score.dtype == torch.float32
    rows = select(selector, probe)
    assert rows.dtype == torch.int64
    assert len(rows) == min(int(selector.ratio * cache.num_rows), int((~cache.exact).sum()))
    assert (rows.diff() > 0).all()
    assert not cache.exact[rows].any()
    again = select(
        selectors[name](), Probe(llama_loom.decoder, cache, prompt.question_ids, prompt.question_span)
    )
    assert torch.equal(rows, again)
    assert all(torch.equal(cache.keys(layer), keys) for layer, keys in enumerate(before))
    assert eval(repr(selector), vars(kvloom.selectors)) == selector, "the repr is the recipe"


def test_recipe_names_what_differs_from_the_defaults() -> None:
    assert InfoFlow().recipe == "infoflow 15%"
    assert InfoFlow(ratio=0.05, layers="paper").recipe == "infoflow 5% layers=paper"
    assert NoRecompute().recipe == "none"
    assert Epic(k=4).recipe == "epic 15% k=4"


@pytest.mark.parametrize("name", sorted(set(selectors) - {"none", "full"}))
@pytest.mark.parametrize("ratio", [-1, 2, 1.0001, float("nan")])
def test_ratio_outside_0_to_1_is_refused(name: str, ratio: float) -> None:
    with pytest.raises(MethodError, match=f"{name}: ratio is the share of rows to recompute, from 0 to 1"):
        selectors[name](ratio=ratio)


@pytest.mark.parametrize("name", sorted(set(selectors) - {"none", "full"}))
def test_ratio_1_takes_every_row_that_is_not_exact_and_ratio_0_none(name: str, llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    cache = llama_loom.splice(prompt)
    assert llama_loom.select(cache, prompt, selectors[name](ratio=1)).tolist() == list(
        range(prompt.spans[1].start, cache.num_rows)
    )
    assert llama_loom.select(cache, prompt, selectors[name](ratio=0)).tolist() == []
    assert len(llama_loom.select(cache, prompt, selectors[name](ratio=1e-9))) == 1


def test_one_registration_per_file() -> None:
    folder = Path(kvloom.selectors.__file__).parent
    for file in folder.glob("*.py"):
        expected = 0 if file.stem in ("__init__", "base") else 1
        assert file.read_text().count("@selectors.register(") == expected, file.name


def test_best_scores_win_ties_go_to_the_earlier_row_and_exact_rows_are_never_taken() -> None:
    weights = torch.tensor([[9, 9, 1, 5, 1, 5, 1, 1, 5, 1, 1, 7]]).float().expand(4, -1)
    assert chosen(InfoFlow(ratio=0.25), FakeProbe(weights)) == [3, 5, 11]
    assert chosen(InfoFlow(ratio=0.5), FakeProbe(weights)) == [2, 3, 4, 5, 8, 11]


def test_a_score_of_the_wrong_shape_or_not_a_number_is_refused() -> None:
    class Short(NoRecompute):
        def score(self, probe: Probe) -> Tensor:
            return torch.zeros(3)

        def budget(self, probe: Probe) -> int:
            return 2

    class Broken(Short):
        def score(self, probe: Probe) -> Tensor:
            return torch.full((12,), torch.nan)

    with pytest.raises(MethodError, match=r"shape \(3,\), the context has 12 rows"):
        chosen(Short(), FakeProbe())
    with pytest.raises(MethodError, match="not a number for 12 rows"):
        chosen(Broken(), FakeProbe())


# --- InfoFlow


def test_infoflow_averages_the_layers_it_is_told_to() -> None:
    weights = torch.zeros(4, 12)
    weights[0, 9], weights[2, 4], weights[3, 6] = 9, 3, 2
    weights[3, 4] = 1
    assert chosen(InfoFlow(ratio=1 / 12, layers=(3,)), FakeProbe(weights)) == [6]
    assert chosen(InfoFlow(ratio=1 / 12, layers="2,3"), FakeProbe(weights)) == [4]
    assert chosen(InfoFlow(ratio=1 / 12, layers="0-1"), FakeProbe(weights)) == [9]
    probe = FakeProbe(weights)
    chosen(InfoFlow(reduction="mass", query="suffix"), probe)
    assert probe.asked == [(("mass",), "global", (1, 2, 3), "suffix")]


@pytest.mark.parametrize(
    ("layers", "num_layers", "expected"),
    [
        ("paper", 40, (22, 23, 24, 25)),  # the paper's own model
        ("paper", 30, (17, 18, 19)),
        ("paper", 1, (0,)),
        ("0.25-1", 30, tuple(range(8, 30))),
        ((0.25, 1.0), 4, (1, 2, 3)),
        ("0-1", 3, (0, 1, 2)),
        ("0.98-0.99", 4, (3,)),
        ("2", 4, (2,)),
        ("3,1,1", 4, (1, 3)),
        ((0, 3), 4, (0, 3)),
        ([2, 1], 4, (1, 2)),
    ],
)
def test_layers_by_band_and_by_index(layers: Any, num_layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_layers(InfoFlow(layers=layers).layers, num_layers) == expected


@pytest.mark.parametrize("layers", ["", "all", "0.5", "0.6-0.5", "0-2", "-1", (-1,), (), "1,x", (0.5,), "1-"])
def test_other_layers_are_refused_when_the_method_is_made(layers: Any) -> None:
    with pytest.raises(MethodError, match="layers must be 'paper', a band"):
        InfoFlow(layers=layers)


def test_layers_that_the_model_does_not_have_are_refused(llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    with pytest.raises(MethodError, match="the model has layers 0 to 2"):
        llama_loom.select(llama_loom.splice(prompt), prompt, InfoFlow(layers="22,23"))


def test_infoflow_options_from_text() -> None:
    built = selectors.build(
        "infoflow", {"ratio": "0.3", "reduction": "mass", "layers": "paper", "query": "suffix"}
    )
    assert built == InfoFlow(ratio=0.3, reduction="mass", layers="paper", query="suffix")
    assert selectors.build("infoflow", {"layers": "17,18"}) == InfoFlow(layers="17,18")
    for option, value in {"ratio": "abc", "reduction": "max", "query": "all"}.items():
        with pytest.raises(MethodError, match=option):
            selectors.build("infoflow", {option: value})
    with pytest.raises(MethodError, match="did you mean 'ratio'"):
        selectors.build("infoflow", {"ration": "0.1"})
    with pytest.raises(MethodError, match="did you mean 'infoflow'"):
        selectors.build("infoflw")


# --- the rivals


def test_epic_takes_the_first_share_or_the_first_k_rows_of_each_chunk() -> None:
    assert chosen(Epic(ratio=0.5), FakeProbe()) == [2, 3, 4, 5, 8, 9]
    assert chosen(Epic(k=1), FakeProbe()) == [2, 8]
    assert chosen(Epic(k=5), FakeProbe()) == [2, 3, 4, 5, 6, 8, 9, 10, 11]
    with pytest.raises(MethodError, match="at least 1, got 0"):
        Epic(k=0)


def test_epic_spends_nothing_on_an_exact_chunk() -> None:
    probe = FakeProbe()
    probe.exact = torch.arange(12) < 8
    assert chosen(Epic(k=2), probe) == [8, 9]


def test_cacheblend_takes_the_rows_whose_values_change_most() -> None:
    """Squared differences summed over heads and channels, by hand: row 4 changes by 2^2 + 2^2, row 9 by 3^2
    in one.
    """
    stored = torch.zeros(2, 12, 2)
    fresh_keys, fresh_values = torch.zeros(2, 12, 2), torch.zeros(2, 12, 2)
    fresh_values[0, 4, 0] = fresh_values[1, 4, 1] = 2
    fresh_values[1, 9, 0] = -3
    fresh_values[0, 0, 0] = 100  # exact already, never taken
    fresh_keys[0, 6, 0] = 1

    class Changing(FakeProbe):
        deviation = Probe.deviation

        def fresh(self, num_layers: int) -> list[tuple[Tensor, Tensor]]:
            self.asked.append(num_layers)
            return [(stored, stored)] * (num_layers - 1) + [(fresh_keys, fresh_values)]

        def values(self, layer: int) -> Tensor:
            return stored

        keys = values

    probe = Changing()
    assert CacheBlend().score(probe)[[4, 9]].tolist() == [8, 9]  # type: ignore[arg-type]
    assert chosen(CacheBlend(ratio=2 / 12), probe) == [4, 9]
    assert chosen(CacheBlend(ratio=1 / 12), probe) == [9]
    assert chosen(CacheBlend(ratio=1 / 12, deviation="keys"), probe) == [6]
    assert chosen(CacheBlend(ratio=1 / 12, check_layer=3), probe) == [9]
    assert probe.asked == [2, 2, 2, 2, 4]
    for options, message in (
        ({"check_layer": 0}, "at least 1"),
        ({"deviation": "both"}, "must be values or keys"),
    ):
        with pytest.raises(MethodError, match=message):
            CacheBlend(**options)
    with pytest.raises(MethodError, match="check_layer is 4, but the model has layers 0 to 3"):
        chosen(CacheBlend(check_layer=4), probe)


def test_cacheblend_computes_its_first_layers_in_full(llama_loom: Loom) -> None:
    """So the KV of layers 0 and 1 is that of a full prefill in every row, and that of layer 2 in the chosen
    rows.
    """
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    full, _ = llama_loom.full_prefill(prompt)
    trace = Trace()
    cache, _ = llama_loom.prepare(prompt, CacheBlend(ratio=0.2), trace=trace)
    rows = llama_loom.select(llama_loom.splice(prompt), prompt, CacheBlend(ratio=0.2))
    context = slice(0, len(prompt.context_ids))
    for layer in (0, 1):
        assert difference(cache.keys(layer)[:, context], full.keys(layer)[:, context]) < FLOAT32
        assert difference(cache.values(layer)[:, context], full.values(layer)[:, context]) < FLOAT32
    assert difference(cache.values(2)[:, rows], full.values(2)[:, rows]) < FLOAT32
    assert difference(cache.values(2)[:, context], full.values(2)[:, context]) > 100 * FLOAT32
    num_rows, num_question = len(rows), len(prompt.question_ids)
    assert trace.token_layers == 2 * len(prompt.context_ids) + 3 * (num_rows + num_question)


def test_infoflow_weighted_by_deviation_multiplies_the_two_signals(llama_loom: Loom) -> None:
    """Attention times the distance of layer-1 values; the two layers computed for it replace the stored KV,
    and they are counted.
    """
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    cache = llama_loom.splice(prompt)
    full, _ = llama_loom.full_prefill(prompt)
    probe = Probe(llama_loom.decoder, cache, prompt.question_ids, prompt.question_span)
    context = slice(0, len(prompt.context_ids))
    distance = (full.values(1)[:, context] - cache.values(1)).norm(dim=(0, 2))
    expected = InfoFlow().score(probe) * distance
    weighted = InfoFlow(ratio=0.2, weight="deviation")
    assert difference(weighted.score(probe), expected) < FLOAT32
    assert select(weighted, probe).tolist() != select(InfoFlow(ratio=0.2), probe).tolist()
    trace = Trace()
    repaired, _ = llama_loom.prepare(prompt, weighted, trace=trace)
    assert difference(repaired.values(1)[:, context], full.values(1)[:, context]) < FLOAT32
    scoring = InfoFlow(ratio=0.2)
    plain = Trace()
    llama_loom.prepare(prompt, scoring, trace=plain)
    assert trace.token_layers == plain.token_layers + 2 * len(prompt.context_ids)
    with pytest.raises(MethodError, match="weight must be one of none, deviation"):
        InfoFlow(weight="values")  # type: ignore[arg-type]


def test_random_is_seeded() -> None:
    probe = FakeProbe()
    assert chosen(Random(ratio=0.4), probe) == chosen(Random(ratio=0.4), probe)
    assert len({tuple(chosen(Random(ratio=0.4, seed=seed), probe)) for seed in range(8)}) > 4
    counts = torch.zeros(12)
    for seed in range(400):
        counts[chosen(Random(ratio=0.25, seed=seed), probe)] += 1
    assert counts[:2].sum() == 0
    assert (counts[2:] - 120).abs().max() < 40, "every other row is as likely as another"


def test_order_puts_the_chunk_with_the_highest_hit_rate_last() -> None:
    """Budget 3 of 12: two of the four rows of the second chunk are hits, one of the six of the first."""
    weights = torch.tensor([[0, 0, 9, 0, 0, 0, 0, 0, 8, 7, 0, 0]]).float().expand(4, -1)
    probe = FakeProbe(weights)
    probe.groups = [[0], [1]]
    assert InfoFlow(ratio=0.25).order(probe) == [0, 1]  # type: ignore[arg-type]
    swapped = FakeProbe(torch.tensor([[0, 0, 9, 8, 7, 0, 0, 0, 0, 0, 0, 0]]).float().expand(4, -1))
    swapped.groups = [[0], [1]]
    assert InfoFlow(ratio=0.25).order(swapped) == [1, 0]  # type: ignore[arg-type]
    assert swapped.asked == [(("norm",), "hl-tp", (1, 2, 3), "suffix")]
    tied = FakeProbe(torch.tensor([[9, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0]]).float().expand(4, -1))
    tied.spans, tied.groups = [range(3, 5), range(5, 8), range(8, 12)], [[0, 2], [1]]
    assert InfoFlow(ratio=0.25).order(tied) == [0, 2, 1], "ties keep their order, groups stay together"  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="epic does not reorder"):
        Epic().order(probe)  # type: ignore[arg-type]


def test_combined_averages_scores_scaled_to_the_same_range() -> None:
    planes = torch.tensor([[0, 0, 1, 0, 2], [5, 5, 9, 5, 5], [3, 3, 3, 3, 3]]).float()

    class Planes(FakeProbe):
        def reduced(self, *reductions: str, **_: Any) -> Tensor:
            assert reductions == ("entropy", "norm", "values")
            return planes[:, None].expand(-1, 3, -1)

    score = InfoFlow(reduction="combined").score(Planes())  # type: ignore[arg-type]
    assert torch.allclose(score, torch.tensor([0, 0, 0.5 + 1, 0, 1]) / 3)


def test_none_has_no_ratio_and_a_layout() -> None:
    assert NoRecompute(layout="pcw").placement == "hl-hp"
    assert NoRecompute(layout="composite").placement == "hl-tp"
    with pytest.raises(MethodError, match="layout must be one of global, pcw, composite"):
        NoRecompute(layout="circle")  # type: ignore[arg-type]


def test_none_has_no_ratio() -> None:
    assert chosen(NoRecompute(), FakeProbe()) == []
    with pytest.raises(MethodError, match="no option 'ratio'"):
        selectors.build("none", {"ratio": "0.5"})
