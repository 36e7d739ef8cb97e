"""Both halves together: chunks compressed when they are indexed, spliced, scored and recomputed in part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from plain_forward import REMOVED, plain, rows_left
from tiny_models import DOCUMENTS, QUESTION, difference, loom_of

from kvloom.compressors.infokv import InfoKV
from kvloom.compressors.keydiff import KeyDiff
from kvloom.compressors.knorm import Knorm
from kvloom.compressors.pyramidkv import PyramidKV
from kvloom.compressors.snapkv import SnapKV
from kvloom.errors import MethodError
from kvloom.kv import ChunkKV
from kvloom.loom import Loom
from kvloom.prefill import prefill
from kvloom.probe import Probe
from kvloom.selectors import as_selector, select

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.compressors import Compressor

COMPRESSORS = [
    Knorm(keep=0.5),
    KeyDiff(keep=0.3),
    SnapKV(keep=0.4, window=4),
    PyramidKV(keep=0.5, window=4),
    InfoKV(keep=0.4, window=4),
]


def halved(loom: Loom, compressor: Compressor, **options: object) -> Loom:
    """A Loom over the same model whose chunks are compressed."""
    tokenizer = ByteTokenizer(eos_token=None)
    return Loom(loom.model, tokenizer, chunk_compressor=compressor, **options)  # type: ignore[arg-type]


def test_keep_1_is_bit_identical(family_loom: Loom) -> None:
    loom = halved(family_loom, Knorm(keep=1))
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    got, expected = loom.splice(prompt), family_loom.splice(prompt)
    for layer in range(len(expected.layers)):
        assert got.layers[layer].rows is None
        assert difference(got.keys(layer), expected.keys(layer)) < 1e-5
        assert difference(got.values(layer), expected.values(layer)) < 1e-5
    assert got.positions.equal(expected.positions)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: compressor.name)
def test_a_compressed_chunk_holds_rows_of_the_whole_one(llama_loom: Loom, compressor: Compressor) -> None:
    loom = halved(llama_loom, compressor)
    loom.index(DOCUMENTS)
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    header = next(prefill(loom.decoder, [prompt.header_ids]))
    for ids in prompt.chunk_ids:
        small = loom.store.get(loom.chunks.key(prompt.header_ids, ids))
        assert small is not None
        whole = next(prefill(loom.decoder, [ids], header))
        if len(ids) < 8:
            continue
        assert small.rows is not None
        assert small.compressor == repr(compressor)
        kept = [rows.shape[1] for rows in small.rows]
        if compressor.name != "pyramidkv":
            assert kept == [int(compressor.keep * len(ids))] * len(kept)
        assert abs(sum(kept) - len(kept) * int(compressor.keep * len(ids))) < len(kept)
        for layer, rows in enumerate(small.rows):
            for head, held in enumerate(rows.long()):
                assert difference(small.keys[layer][head], whole.keys[layer][head, held]) < 1e-5
                assert difference(small.values[layer][head], whole.values[layer][head, held]) < 1e-5


@pytest.mark.parametrize("header", ["shared", "none"])
def test_recomputing_what_is_left_equals_a_forward_without_the_rest(family_loom: Loom, header: str) -> None:
    """Every row that any head still has is recomputed under the exact mask: causal, less what was dropped."""
    loom = halved(family_loom, Knorm(keep=0.5))
    loom.prompt_format = type(loom.prompt_format)(header=header)  # type: ignore[arg-type]
    prompt = loom.prompt(QUESTION, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[3]])
    cache = loom.splice(prompt)
    left, num_rows, total = rows_left(cache), cache.num_rows, prompt.num_tokens
    assert any(rows.shape[1] < num_rows for rows in left)
    num_before = cache.num_bytes
    logits = loom.recompute(cache, cache.is_held.nonzero().flatten(), prompt)
    visible = []
    for rows in left:
        seen = torch.ones(total, total, dtype=torch.bool).tril().repeat(len(rows), 1, 1)
        for head, held in enumerate(rows):
            gone = sorted(set(range(num_rows)) - set(held.tolist()))
            seen[head][:, gone] = False
            seen[head][~seen[head].any(1), 0] = True  # rows held nowhere, before any that is
        visible.append(seen)
    expected = plain(loom, prompt.token_ids, visible)
    assert difference(logits, expected.logits[-1]) < 10 * REMOVED
    for layer, rows in enumerate(left):
        for head, held in enumerate(rows):
            got = cache.values(layer)[head, : len(held)]
            assert difference(got, expected.values[layer][head, held]) < 10 * REMOVED
    question_bytes = cache.num_bytes - num_before
    assert question_bytes == len(prompt.question_ids) * num_question_bytes(loom)


def num_question_bytes(loom: Loom) -> int:
    return sum(4 * shape.num_heads * (shape.key_dim + shape.value_dim) for shape in loom.decoder.kv_shapes)


@pytest.mark.parametrize(
    "method", ["random", "epic", "infoflow", "cacheblend", "infoflow:values", "infoflow:deviation"]
)
def test_methods_choose_rows_that_are_left(llama_loom: Loom, method: str) -> None:
    name, _, how = method.partition(":")
    options = {"weight": how} if how == "deviation" else {"reduction": how} if how else {}
    selector = as_selector(name, {"ratio": 0.2, **options})
    loom = halved(llama_loom, Knorm(keep=0.3))
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    cache = loom.splice(prompt)
    assert not cache.is_held.all(), "some rows are left nowhere, else this proves nothing"
    before = [cache.keys(layer).clone() for layer in range(loom.decoder.num_layers)]
    rows = select(selector, Probe(loom.decoder, cache, prompt.question_ids, prompt.question_span))
    assert len(rows) == int(0.2 * cache.num_rows)
    assert cache.is_held[rows].all()
    assert all(cache.keys(layer).equal(keys) for layer, keys in enumerate(before))
    answer = loom.answer(QUESTION, DOCUMENTS, selector=selector, max_new_tokens=3)
    assert answer.trace.recomputed_rows == len(rows)
    assert answer.trace.kv_bytes < 0.6 * prompt.num_tokens * num_question_bytes(loom)


def test_scores_are_those_of_the_masked_question(llama_loom: Loom) -> None:
    """The attention that the probe reports is by row, and 0 where the head has dropped it."""
    loom = halved(llama_loom, Knorm(keep=0.4))
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    cache = loom.splice(prompt)
    probe = Probe(loom.decoder, cache, prompt.question_ids, prompt.question_span)
    for layer, maps in probe.attention().items():
        rows = rows_left(cache)[layer]
        is_held = torch.zeros(len(rows), cache.num_rows, dtype=torch.bool).scatter_(1, rows, True)
        assert maps.shape[-1] == cache.num_rows
        assert (maps * ~is_held[:, None, None]).sum() == 0
        assert (maps.sum((1, 2)) > 0).equal(is_held)
    masses = probe.reduced("mass", "norm")
    assert difference(masses[0, 0], probe.attention()[0].flatten(0, 1).mean(0).sum(0)) < 1e-5


def test_geometries_reorder_and_context_work_on_what_is_left(llama_loom: Loom) -> None:
    loom = halved(llama_loom, SnapKV(keep=0.5, window=4))
    for options in ({"geometry": "hl-tp"}, {"geometry": "tl-tp"}):
        assert loom.answer(QUESTION, DOCUMENTS, options=options, max_new_tokens=2).token_ids is not None
    assert loom.answer(QUESTION, DOCUMENTS, reorder=True, max_new_tokens=2).trace.chunk_order
    answer = loom.answer(QUESTION, DOCUMENTS, compressor=SnapKV(keep=0.5, window=4), max_new_tokens=2)
    assert answer.trace.compressions
    cache = loom.context(QUESTION, DOCUMENTS)
    ids = loom.prompt(QUESTION, DOCUMENTS).question_ids
    own = loom.model.generate(**cache.generate_kwargs(ids), max_new_tokens=4, do_sample=False)
    expected = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert own[0, len(ids) :].tolist() == list(expected.token_ids)


def test_each_compressor_has_entries_of_its_own(tmp_path: Path) -> None:
    plain_loom = loom_of("llama", store=f"disk:{tmp_path}")
    loom = halved(plain_loom, Knorm(keep=0.5), store=f"disk:{tmp_path}")
    other = halved(plain_loom, Knorm(keep=0.4), store=f"disk:{tmp_path}")
    keys = [set(each.index(DOCUMENTS)) for each in (plain_loom, loom, other)]
    assert not keys[0] & keys[1]
    assert not keys[1] & keys[2]
    again = halved(plain_loom, Knorm(keep=0.5), store=f"disk:{tmp_path}")
    fresh, reread = (
        loom.splice(again.prompt(QUESTION, DOCUMENTS)),
        again.splice(again.prompt(QUESTION, DOCUMENTS)),
    )
    assert all(fresh.keys(layer).equal(reread.keys(layer)) for layer in range(len(fresh.layers)))
    assert again.answer(QUESTION, DOCUMENTS, max_new_tokens=1).trace.prefilled_tokens == 0
    assert not again.store.rejections


def test_rows_that_cannot_be_are_refused() -> None:
    ids, keys = torch.arange(4), torch.zeros(1, 2, 3)
    good = torch.tensor([[1, 3]], dtype=torch.int32)
    ChunkKV(ids, (keys,), (keys,), fingerprint="m", rows=(good,))
    for rows in ([[3, 1]], [[1, 1]], [[1, 4]], [[-1, 2]], [[1, 2], [1, 2]], [[1, 2, 3]]):
        with pytest.raises(ValueError, match="layer 0"):
            ChunkKV(ids, (keys,), (keys,), fingerprint="m", rows=(torch.tensor(rows, dtype=torch.int32),))


def test_verify_wants_whole_chunks(llama_loom: Loom) -> None:
    loom = halved(llama_loom, Knorm(keep=0.5))
    with pytest.raises(MethodError, match="chunk_compressor"):
        loom.verify([QUESTION], DOCUMENTS)
