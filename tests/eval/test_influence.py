"""Forward Influence: sets of rows, their removal, the run, and what the report says of known numbers."""

from __future__ import annotations

import copy
import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import FAMILIES, build, loom_of

from kvloom.attention import ByPosition, Heads, attend
from kvloom.errors import EvalError, MethodError
from kvloom.eval import influence
from kvloom.eval.continuations import far, near
from kvloom.eval.influence import computed, removal_sets, without
from kvloom.eval.influence import influence as influence_of
from kvloom.eval.influence_numbers import crossing, reach, regression, without_largest
from kvloom.eval.influence_report import report
from kvloom.eval.influence_sets import (
    BINS,
    CELLS,
    DEFAULT_SETS,
    SINKS,
    RemovalSet,
    equal_parts,
    mass,
    pick,
    stratified,
)
from kvloom.eval.metrics import kl_per_token
from kvloom.eval.texts import TextDocument

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from kvloom.loom import Loom

PREFIX, CONTINUATION, WINDOW, SHARE = 160, 256, 16, 0.1
NUMBER = 16  # rows of that share
ALL = range(3)
NONE = torch.empty(0, dtype=torch.int64)


def random_ids(seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (PREFIX + CONTINUATION + 1,), generator=generator)


@pytest.fixture(scope="module")
def loom() -> Loom:
    return loom_of("llama")


@pytest.fixture(scope="module")
def prefix(loom: Loom) -> influence.Prefix:
    return computed(loom.decoder, random_ids(), PREFIX, WINDOW, seed=3)


def of(text: str, share: float = SHARE) -> RemovalSet:
    return RemovalSet.parse(text, share)


# --- removal


class Masked:
    """By position, but nobody sees the removed rows (L, H, m)."""

    def __init__(self, plan: ByPosition, removed: Tensor) -> None:
        self.plan, self.removed = plan, removed

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        mask = self.plan.key_positions(layer) <= self.plan.query_positions[:, None]
        hidden = torch.zeros((len(keys), keys.shape[1]), dtype=torch.bool).scatter(
            1, self.removed[layer], True
        )
        return attend(query, keys, values, mask & ~hidden[:, None], heads)


def test_removal_per_layer_and_head_is_a_mask(loom: Loom, prefix: influence.Prefix) -> None:
    rows, ids = pick(prefix.scores, of("attention-head")), prefix.reference.ids
    assert rows.shape == (3, 2, NUMBER)
    assert not rows[0, 0].equal(rows[0, 1])
    removed = loom.decoder.follow(ids, without(loom.decoder, prefix.cache, rows, ALL))
    twin = without(loom.decoder, prefix.cache, NONE, range(0))
    positions = PREFIX + torch.arange(len(ids))
    states = loom.decoder.observe(ids, positions, twin, None, lambda plan: Masked(plan, rows))
    masked = loom.decoder.head(states)
    scale = float(masked.abs().max())
    assert float((removed - masked).abs().max()) < 1e-5 * scale
    assert float((removed - prefix.reference.logits).abs().max()) > 1e-2 * scale, "it does change something"


def test_removal_of_tokens_is_an_additive_mask_of_the_models_own(
    loom: Loom, prefix: influence.Prefix
) -> None:
    """The model as transformers runs it, with -inf added to the scores of the continuation's queries."""
    rows, ids = pick(prefix.scores, of("entropy")), random_ids()[:-1]
    mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)
    mask[PREFIX:, rows] = torch.finfo(torch.float32).min
    with torch.no_grad():
        expected = build(FAMILIES["llama"])(input_ids=ids[None], attention_mask=mask[None, None]).logits[0]
    removed = loom.decoder.follow(ids[PREFIX:], without(loom.decoder, prefix.cache, rows, ALL))
    scale = float(expected.abs().max())
    assert float((removed - expected[PREFIX:]).abs().max()) < 1e-5 * scale
    found = influence_of(prefix, rows, ALL, "total")
    kl = kl_per_token(prefix.reference.logits, expected[PREFIX:]).view(2, 128).mean(1)
    assert found.kl == pytest.approx(kl.tolist(), rel=1e-3)
    assert min(found.kl) > 1e-4


def test_nothing_removed_and_rows_in_another_order_change_nothing(prefix: influence.Prefix) -> None:
    for effect in influence.EFFECTS:
        for is_permuted in (False, True):
            found = influence_of(prefix, NONE, ALL, effect, is_permuted=is_permuted)
            assert max(found.kl) < 1e-8
            assert found.agreement == [1, 1]
    held = prefix.cache.positions
    assert held.equal(torch.arange(PREFIX)), "the prefix itself stays as it was"
    assert prefix.whole.num_rows == PREFIX + CONTINUATION


def test_the_direct_effect_is_the_total_one_in_the_first_chunk_only(
    loom: Loom, prefix: influence.Prefix
) -> None:
    rows = pick(prefix.scores, of("attention"))
    total, direct = (influence_of(prefix, rows, ALL, effect) for effect in ("total", "direct"))
    assert direct.kl[0] == pytest.approx(total.kl[0], rel=1e-4)
    assert direct.kl[1] != pytest.approx(total.kl[1], rel=1e-2)
    # the oracle: the second chunk's queries alone do not see the rows
    ids = random_ids()[:-1]
    mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)
    mask[PREFIX + 128 :, rows] = torch.finfo(torch.float32).min
    with torch.no_grad():
        masked = build(FAMILIES["llama"])(input_ids=ids[None], attention_mask=mask[None, None]).logits[0]
    kl = kl_per_token(prefix.reference.logits[128:], masked[PREFIX + 128 :])
    assert direct.kl[1] == pytest.approx(float(kl.mean()), rel=1e-3)


def test_a_third_of_the_layers_is_what_the_others_leave(prefix: influence.Prefix) -> None:
    assert [list(of(f"entropy:{third}").layers(7)) for third in ("early", "middle", "late")] == [
        [0, 1],
        [2, 3],
        [4, 5, 6],
    ]
    rows = pick(prefix.scores, of("attention"))
    only = without(prefix.decoder, prefix.cache, rows, range(1, 2))
    assert [layer.length for layer in only.layers] == [PREFIX, PREFIX - NUMBER, PREFIX]
    by_third = [influence_of(prefix, rows, range(n, n + 1), "total").kl[0] for n in range(3)]
    assert len({round(kl, 9) for kl in by_third}) == 3


# --- sets


def test_every_set_has_its_size_and_leaves_sinks_and_window_alone(prefix: influence.Prefix) -> None:
    for text in DEFAULT_SETS:
        rows = pick(prefix.scores, of(text))
        if of(text).score in ("nothing", "permuted"):
            assert rows.numel() == 0
            continue
        assert rows.shape[-1] == NUMBER
        assert int(rows.min()) >= SINKS
        assert int(rows.max()) < PREFIX - WINDOW
        assert (rows.diff(dim=-1) > 0).all()


def test_matched_sets_share_one_histogram_of_positions(prefix: influence.Prefix) -> None:
    edges = torch.tensor([part[0] for part in torch.tensor_split(prefix.scores.candidates, BINS)])
    wanted = equal_parts(NUMBER, BINS)
    assert sum(wanted) == NUMBER
    for text in DEFAULT_SETS:
        if ":matched" in text:
            rows = pick(prefix.scores, of(text)).reshape(-1, NUMBER)
            for one in rows:
                found = torch.bincount(torch.bucketize(one, edges, right=True) - 1, minlength=BINS)
                assert found.tolist() == wanted, text
    unmatched = torch.bucketize(pick(prefix.scores, of("recent")), edges, right=True) - 1
    assert torch.bincount(unmatched, minlength=BINS).tolist() != wanted


def test_each_score_picks_what_its_name_says(prefix: influence.Prefix) -> None:
    scores = prefix.scores
    candidates = scores.candidates

    def top(score: Tensor) -> list[int]:
        return sorted(candidates[score[candidates].argsort(descending=True)[:NUMBER]].tolist())

    entropy = prefix.cache.side["entropy"]
    window = torch.stack([scores.probe.window(layer, WINDOW).mean((0, 1, 2)) for layer in ALL])
    values = torch.stack([prefix.cache.values(layer).norm(dim=-1).mean(0) for layer in ALL]).mean(0)
    expected = {
        "entropy": top(entropy),
        "low-entropy": top(-entropy),
        "attention-last": top(window[-1]),
        "sum": top(window[-1] + entropy.softmax(0)),
        "value-norm": top(values),
        "recent": list(range(PREFIX - WINDOW - NUMBER, PREFIX - WINDOW)),
    }
    for name, rows in expected.items():
        assert pick(scores, of(name)).tolist() == rows, name
    assert len({tuple(rows) for rows in expected.values()}) == len(expected)
    heads = pick(scores, of("attention-head"))
    token = mass(scores, pick(scores, of("attention")), ALL)
    assert mass(scores, heads, ALL) > mass(scores, pick(scores, of("random")), ALL)
    assert mass(scores, pick(scores, of("attention-last")), range(2, 3)) == pytest.approx(
        float(window[-1][pick(scores, of("attention-last"))].sum()) / 3
    )
    assert 0 < token < 1


def test_random_mass_has_the_attention_of_the_entropy_set_and_none_of_its_rows(
    prefix: influence.Prefix,
) -> None:
    scores = copy.copy(prefix.scores)
    spiky = torch.randn(scores.seen.shape[-1], generator=torch.Generator().manual_seed(0)).exp()
    scores.seen = (spiky / spiky.sum()).expand(scores.seen.shape)
    for how in ("", ":matched"):
        chosen, others = (pick(scores, of(name + how)) for name in ("entropy", "random-mass"))
        assert not set(chosen.tolist()) & set(others.tolist())
        aimed, found = (mass(scores, rows, ALL) for rows in (chosen, others))
        assert abs(found - aimed) < 0.06 * aimed
        drawn = [SINKS + torch.randperm(140)[:NUMBER] for _ in range(50)]
        assert sum(abs(mass(scores, rows, ALL) - aimed) for rows in drawn) / 50 > 0.2 * aimed, "as by chance"


def test_single_rows_come_from_all_cells_and_positions(prefix: influence.Prefix) -> None:
    scores = prefix.scores
    found = stratified(scores, 24)
    assert {cell: list(found.values()).count(cell) for cell in CELLS} == dict.fromkeys(CELLS, 6)
    attention = scores.attention[scores.candidates].median()
    entropy = scores.entropy[scores.candidates].median()
    for row, cell in found.items():
        level = ("high" if scores.attention[row] > attention else "low") + " attention, "
        assert cell == level + ("high" if scores.entropy[row] > entropy else "low") + " entropy"
    rows = list(found)
    assert min(rows) < 40
    assert max(rows) > 120


@pytest.mark.parametrize(
    ("text", "share", "message"),
    [
        ("entropi", 0.1, "unknown score 'entropi'; did you mean 'entropy'"),
        ("entropy:matchd", 0.1, "'matchd' is not one of matched, early, middle and late"),
        ("entropy:early:late", 0.1, "'late' is not one of"),
        ("recent:matched", 0.1, "recent takes no matched"),
        ("nothing:early", 0.1, "nothing takes no early"),
        ("entropy", 1.0, "above 0 and below 1, got 1.0"),
        ("entropy", 0.0, "above 0 and below 1, got 0.0"),
    ],
)
def test_sets_that_cannot_be(text: str, share: float, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        RemovalSet.parse(text, share)


def test_sets_that_this_prefix_does_not_have(loom: Loom, prefix: influence.Prefix) -> None:
    for text, share, message in (
        ("entropy", 0.001, "0 of 160 rows are to be removed"),
        ("entropy", 0.99, "158 of 160 rows are to be removed, of which 140 may be"),
        ("random-mass", 0.6, "random-mass needs as many other rows as entropy picks"),
    ):
        with pytest.raises(MethodError, match=message):
            pick(prefix.scores, of(text, share))
    with pytest.raises(MethodError, match="has no row to remove: the first 4 and the last 160 are kept"):
        computed(loom.decoder, random_ids(), PREFIX, 160, seed=0)
    with pytest.raises(MethodError, match="given twice"):
        removal_sets(["entropy", "entropy"], [0.1])
    assert [one.share for one in removal_sets(["entropy", "nothing"], [0.1, 0.2])] == [0.1, 0.2, 0.0]


# --- the run


def measured(loom: Loom, folder: Path, **options: Any) -> list[dict[str, Any]]:
    texts = {"prose": [TextDocument("prose", f"d{n}", random_ids(n)) for n in range(2)]}
    recipe = influence.make_recipe(
        loom,
        "tiny",
        texts,
        prefix=PREFIX,
        continuation=CONTINUATION,
        **{
            "removed": ["entropy", "random", "nothing"],
            "shares": [SHARE],
            "singles": 4,
            "seed": 0,
            "effects": ["total", "direct"],
            "window": WINDOW,
            **options,
        },
    )
    influence.run(loom, texts, recipe, folder)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_run_measures_each_set_once_and_goes_on_where_it_stopped(
    loom: Loom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = measured(loom, tmp_path / "whole")
    assert len(lines) == 2 * 2 * (3 + 4)
    by = {(line["document"], line["removed"], line["effect"]): line for line in lines}
    scores = computed(loom.decoder, random_ids(0), PREFIX, WINDOW, seed=0).scores
    line = by["d0", "entropy", "total"]
    rows = pick(scores, of("entropy"))
    assert line["num_removed"] == NUMBER
    assert line["mean_position"] == pytest.approx(float(rows.double().mean()))
    assert line["mass"] == pytest.approx(mass(scores, rows, ALL))
    assert max(by["d0", "nothing", "total"]["kl"]) < 1e-8 < min(line["kl"])
    single = next(one for one in lines if one["removed"].startswith("row "))
    row = int(single["removed"].removeprefix("row "))
    assert single["entropy"] == pytest.approx(float(scores.entropy[row]))
    assert fmean(single["kl"]) < fmean(line["kl"]), "one row matters less than sixteen"
    part = tmp_path / "part"
    part.mkdir()
    (part / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    text = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    (part / "results.jsonl").write_text("\n".join(text[:-2]) + "\n")
    calls: list[Any] = []
    monkeypatch.setattr(
        influence, "influence", lambda *args, **kwargs: calls.append(args) or influence_of(*args, **kwargs)
    )
    assert [one["kl"] for one in measured(loom, part)] == [one["kl"] for one in lines]
    assert len(calls) == 2
    with pytest.raises(EvalError, match="another recipe"):
        measured(loom, part, seed=1)
    report(part)
    text = (part / "report.md").read_text()
    assert "Total and direct effect" in text
    assert "Single rows, direct effect" in text


# --- numbers and the report


def test_reach_is_a_ratio_of_sums() -> None:
    curves = [[4.0, 2.0, 2.0, 1.0], [2.0, 2.0, 1.0, 0.0]]
    found = reach(curves)
    assert found.mean == pytest.approx((1.5 + 0.5) / (3 + 2))
    assert found.low <= found.mean <= found.high
    assert (found.low, found.high) == pytest.approx((0.25, 0.5)), "either document alone"


def test_the_crossing_is_where_one_curve_stays_above_the_other() -> None:
    low, high = [1.0, 3.0, 1.0, 4.0], [2.0, 2.0, 2.0, 3.0]
    found = crossing([low], [high], 128)
    assert (found.token, found.low, found.high, found.share_never) == (384, 384, 384, 0)
    assert crossing([high], [low], 128).token == float("inf")
    assert crossing([[9.0] * 4], [high], 128).token == 0
    mixed = crossing([low, [0.0] * 4], [high, [1.0] * 4], 128)
    assert mixed.token == float("inf")
    assert mixed.share_never == pytest.approx(0.75, abs=0.02), "where the second document is drawn"


def test_the_regression_finds_what_influence_was_made_of() -> None:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for n in range(60):
        attention, entropy, position, norm = torch.rand(4, generator=generator).tolist()
        kl = float(torch.exp(torch.tensor(2 * entropy + (n % 3))))  # and a document's own level
        lines.append(
            {
                "document": f"d{n % 3}",
                "attention": attention,
                "entropy": entropy,
                "mean_position": position,
                "value_norm": norm,
                "kl": [kl] * 4,
            }
        )
    found = regression(lines, near)
    assert found is not None
    spread = torch.tensor([line["entropy"] for line in lines]).view(20, 3)
    expected = 2 * float((spread - spread.mean(0)).pow(2).mean().sqrt())
    assert [one.mean for one in found] == pytest.approx([0, expected, 0, 0], abs=1e-6)
    assert found[1].low > 0
    assert regression(lines[:7], far) is None


def test_one_document_that_is_most_of_a_mean_is_named() -> None:
    assert without_largest([1.0, 6.0, 3.0]) == (0.6, 2.0)


def write_run(folder: Path, levels: dict[str, Callable[[int], tuple[float, float]]], number: int) -> None:
    """A run of one share; each set has a near and a far influence in each document."""
    recipe = {
        "model": "tiny",
        "sets": ["prose"],
        "documents": number,
        "prefix": 160,
        "continuation": 512,
        "fingerprint": "f" * 64,
        "data": {},
        "kvloom_version": "1",
        "versions": {"torch": "2"},
        "removed": list(levels),
        "shares": [SHARE],
        "effects": ["total"],
        "singles": 0,
        "window": 16,
    }
    (folder / "run.json").write_text(json.dumps(recipe))
    lines = []
    for removed, level in levels.items():
        for n in range(number):
            first, last = level(n)
            lines.append(
                {
                    "set": "prose",
                    "document": f"d{n}",
                    "removed": removed,
                    "effect": "total",
                    "share": 0.0 if removed == "nothing" else SHARE,
                    "agreement": [1.0] * 4,
                    "num_removed": 16,
                    "mean_position": 80.0,
                    "mass": 0.2,
                    "kl": [first, first, last, last],
                    "dnll": [first, first, last, last],
                }
            )
    (folder / "results.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_the_report_answers_from_the_numbers(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        {
            "attention-last": lambda n: (0.030 + 0.001 * n, 0.004),
            "entropy": lambda n: (0.010 + 0.001 * n, 0.012 if n else 0.9),
            "random": lambda n: (0.005, 0.02 - 0.005 * n),
            "low-entropy": lambda n: (0.001, 0.001),
            "nothing": lambda n: (1e-12, 1e-12),
        },
        6,
    )
    page = report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    (paper,) = [line for line in text.splitlines() if "against the paper's attention:" in line]
    assert "near: smaller (12.5 and 32.5;" in paper
    assert "far: larger (160 and 4;" in paper
    (chance,) = [line for line in text.splitlines() if "High entropy against chance" in line]
    assert "near: larger" in chance
    assert "far: no difference that 6 documents can show" in chance
    assert "One document has 94% of entropy's far influence summed over 6; without it the mean is 12." in text
    assert "Noise floor: removing nothing changes predictions by 1.0e-09 at most." in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (row,) = [row for row in rows if row[0] == "entropy" and len(row) == 12]
    assert (row[1:4], row[5], row[7]) == (["16", "80", "20.0%"], "12.5", "12")
    assert row[8].startswith("12.80 ["), "reach: far over near"
    assert row[9] == "62.5", "near influence over the attention removed"
    assert "| entropy | attention-last | from token 256 on [256, 256]; never in 0% of resamples |" in text
    assert page.read_text().count("<svg") == 1


def test_documents_that_a_set_lacks_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, {"entropy": lambda n: (0.1, 0.1), "random": lambda n: (0.1, 0.1)}, 3)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    report(tmp_path)
    assert "total effect, 2 documents" in (tmp_path / "report.md").read_text()
    (tmp_path / "run.json").write_text('{"model": "m"}')
    with pytest.raises(EvalError, match="not the recipe of a run of `kvloom influence`"):
        report(tmp_path)
