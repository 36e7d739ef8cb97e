from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import DOCUMENTS, FLOAT32, QUESTION, difference

from kvloom.errors import MethodError
from kvloom.layout import LAYOUTS
from kvloom.probe import Probe

if TYPE_CHECKING:
    from kvloom.loom import Loom


def probe_of(loom: Loom, documents: list[str] = DOCUMENTS) -> tuple[Probe, torch.Tensor]:
    prompt = loom.prompt(QUESTION, documents)
    cache = loom.splice(prompt)
    return Probe(loom.decoder, cache, prompt.question_ids, prompt.question_span), prompt.question_ids


def test_reductions_are_those_of_the_whole_maps(llama_loom: Loom) -> None:
    """norm: head mean, then L2 over question tokens (the authors' code); mass: the column sum (the paper's
    Eq. 7).
    """
    probe, _ = probe_of(llama_loom)
    maps = probe.attention()
    norm, mass = probe.reduced("norm", "mass")
    for layer, attention in maps.items():  # (H, G, Q, T)
        assert attention.shape == (2, 2, len(QUESTION) + 1, probe.num_rows)
        mean = attention.mean((0, 1))
        assert difference(norm[layer], mean.square().sum(0).sqrt()) < FLOAT32
        assert difference(mass[layer], mean.sum(0)) < FLOAT32
    assert (norm[1].argsort() != mass[1].argsort()).any()


def test_only_the_question_or_the_whole_suffix_is_heard(llama_loom: Loom) -> None:
    probe, question_ids = probe_of(llama_loom)
    span = probe.question_span
    assert 0 < span.start < span.stop < len(question_ids), "label before, answer cue after"
    suffix = probe.attention(query="suffix", layers=[2])[2]
    question = probe.attention(query="question", layers=[2])[2]
    assert suffix.shape[2] == len(question_ids)
    assert difference(question, suffix[:, :, span.start : span.stop]) < FLOAT32


def test_later_question_tokens_do_not_change_what_earlier_ones_see(llama_loom: Loom) -> None:
    probe, question_ids = probe_of(llama_loom)
    whole = probe.attention(query="suffix")
    shorter = Probe(llama_loom.decoder, probe._spliced, question_ids[:5], range(5)).attention(query="suffix")
    for layer in whole:
        assert difference(shorter[layer], whole[layer][:, :, :5]) < FLOAT32


def test_cost_counts_the_rows_and_layers_really_run_and_nothing_twice(llama_loom: Loom) -> None:
    probe, question_ids = probe_of(llama_loom)
    assert probe.cost == 0
    probe.reduced("norm", layers=[0, 1])
    assert probe.cost == probe.question_span.stop * 2, "early exit after the last layer asked for"
    probe.reduced("norm", layers=[0, 1])
    assert probe.cost == probe.question_span.stop * 2
    probe.reduced("norm", layers=[2], query="suffix")
    assert probe.cost == probe.question_span.stop * 2 + len(question_ids) * 3


def test_fresh_is_the_beginning_of_a_full_prefill(llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    full, _ = llama_loom.full_prefill(prompt)
    probe, _ = probe_of(llama_loom)
    context = slice(0, probe.num_rows)
    fresh = probe.fresh(2)
    assert len(fresh) == 2
    for layer, (keys, values) in enumerate(fresh):
        assert difference(keys, full.keys(layer)[:, context]) < FLOAT32
        assert difference(values, full.values(layer)[:, context]) < FLOAT32
    assert probe.cost == probe.num_rows * 2
    assert difference(probe.values(1), full.values(1)[:, context]) > 100 * FLOAT32


def test_unknown_wishes_are_refused(llama_loom: Loom) -> None:
    probe, _ = probe_of(llama_loom)
    with pytest.raises(MethodError, match="unknown reduction 'max'; there are: entropy, mass, norm, values"):
        probe.reduced("max")
    with pytest.raises(MethodError, match=r"lie in 0\.\.2, got \[3\]"):
        probe.reduced("norm", layers=[3])
    with pytest.raises(MethodError, match="unknown query"):
        probe.reduced("norm", query="answer")
    with pytest.raises(MethodError, match="unknown geometry 'local'"):
        probe.attention("local")


def test_value_weighted_and_entropy_reductions_by_the_whole_maps(llama_loom: Loom) -> None:
    probe, _ = probe_of(llama_loom)
    maps = probe.attention()
    entropy, values = probe.reduced("entropy", "values", layers=[0, 2])
    for plane, layer in enumerate((0, 2)):
        mean = maps[layer].mean((0, 1))
        assert difference(entropy[plane], -(mean * mean.log()).sum(0)) < FLOAT32
        norms = probe.values(layer).norm(dim=-1)  # (H, T)
        expected = (maps[layer].sum((1, 2)) * norms).sum(0)
        assert difference(values[plane], expected) < FLOAT32


@pytest.mark.parametrize("geometry", sorted(LAYOUTS))
def test_scores_under_a_geometry_are_those_of_chunks_computed_at_its_positions(
    llama_loom: Loom, geometry: str
) -> None:
    """The oracle moves no key: chunks are prefilled at the geometry's positions, and the question runs over
    them.
    """
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS)
    spliced = llama_loom.splice(prompt)
    before = [spliced.keys(layer).clone() for layer in range(3)]
    probe = Probe(
        llama_loom.decoder,
        spliced,
        prompt.question_ids,
        prompt.question_span,
        respliced=lambda name: llama_loom.splice(prompt, placement=name),
    )
    lengths = [len(ids) for ids in prompt.chunk_ids]
    layout = LAYOUTS[geometry](1, lengths)
    cache = llama_loom.decoder.new_cache(prompt.num_tokens)
    llama_loom.decoder.fill(prompt.header_ids, torch.arange(1), cache, num_new=1)
    for ids, start in zip(prompt.chunk_ids, layout.starts, strict=True):
        alone = llama_loom.decoder.new_cache(len(ids) + 1)
        positions = start + torch.arange(len(ids))
        llama_loom.decoder.fill(prompt.header_ids, torch.arange(start - 1, start), alone, num_new=1)
        llama_loom.decoder.fill(ids, positions, alone, num_new=len(ids))
        rows = cache.announce(ids, positions)
        cache.allocate()
        for layer in range(3):
            cache.write(layer, rows, alone.keys(layer)[:, 1:], alone.values(layer)[:, 1:])
    cache.next_position = layout.next_position
    expected = Probe(llama_loom.decoder, cache, prompt.question_ids, prompt.question_span).attention()
    got = probe.attention(geometry)
    for layer in range(3):
        assert difference(got[layer], expected[layer]) < FLOAT32
        assert torch.equal(spliced.keys(layer), before[layer]), "scoring leaves the cache untouched"
    if geometry != "global":
        assert difference(got[2], probe.attention()[2]) > 100 * FLOAT32


def test_geometries_agree_on_a_single_chunk(llama_loom: Loom) -> None:
    prompt = llama_loom.prompt(QUESTION, DOCUMENTS[:1])
    probe = Probe(
        llama_loom.decoder,
        llama_loom.splice(prompt),
        prompt.question_ids,
        prompt.question_span,
        respliced=lambda name: llama_loom.splice(prompt, placement=name),
    )
    for geometry in LAYOUTS:
        assert difference(probe.reduced("norm", geometry=geometry), probe.reduced("norm")) < FLOAT32
