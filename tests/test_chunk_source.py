"""Chunks from a store: why one is missing, and that the next is read while the last is worked on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from tiny_models import DOCUMENTS, FAMILIES, QUESTION, build, loom_of

from kvloom.chunk_source import ChunkSource
from kvloom.loom import Loom
from kvloom.prompt import PromptFormat
from kvloom.selectors import NoRecompute
from kvloom.splice import Move
from kvloom.store import MemoryStore, open_store
from kvloom.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from kvloom.store.lookup import Lookup


def reasons(loom: Loom) -> set[str | None]:
    """Why chunks of the documents are missing, the header left out."""
    trace = Trace()
    loom.splice(loom.prompt(QUESTION, DOCUMENTS), trace=trace)
    return {found["reason"] for found in trace.lookups[1:]}


def made(store: str, seed: int = 0, **options: Any) -> Loom:
    tokenizer = ByteTokenizer(eos_token=None)
    return Loom(build(FAMILIES["llama"], seed=seed), tokenizer, store=store, **options)


@pytest.mark.parametrize("tiers", ["", "memory:1MiB,"])
def test_a_miss_says_what_sets_it_apart_from_what_is_stored(tmp_path: Path, tiers: str) -> None:
    store = f"{tiers}disk:{tmp_path}"
    assert reasons(made(store)) == {"never stored"}
    assert reasons(made(store)) == {None}
    assert reasons(made(store, seed=1)) == {"other fingerprint"}
    other = PromptFormat(header="none")
    assert reasons(made(store, prompt_format=other)) == {"other header"}
    assert reasons(made(store, chunk_compressor="knorm")) == {"other compressor"}
    assert reasons(made(store, chunk_compressor="knorm")) == {None}
    keyless = open_store(f"disk:{tmp_path / 'else'}")
    assert keyless.kin(torch.arange(3)) == []


def test_an_entry_of_another_key_stays_for_who_can_read_it(tmp_path: Path) -> None:
    urls = []
    for name in "ab":
        (tmp_path / name).write_text(name * 64)
        urls.append(f"disk:{tmp_path / 'chunks'}?key_file={tmp_path / name}")
    first = made(urls[0])
    answer = first.answer(QUESTION, DOCUMENTS, max_new_tokens=3).token_ids
    before = {path: path.read_bytes() for path in (tmp_path / "chunks").glob("*/*.safetensors")}
    assert len(before) == 5
    stranger = made(urls[1])
    assert stranger.answer(QUESTION, DOCUMENTS, max_new_tokens=3).token_ids == answer
    assert reasons(stranger) == {"unreadable"}
    assert {path: path.read_bytes() for path in (tmp_path / "chunks").glob("*/*.safetensors")} == before
    assert reasons(made(urls[0])) == {None}


class Gated(MemoryStore):
    """Notes what it is asked for, and may be slow to answer."""

    is_immediate, is_remote = False, True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.went_on = threading.Event()

    def _find(self, key: str) -> Lookup:
        self.asked.append(key)
        self.went_on.set()
        return super()._find(key)


def test_the_next_chunk_is_read_while_the_last_is_worked_on() -> None:
    loom = loom_of("llama", store=Gated())
    store = loom.store
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    loom.index(DOCUMENTS)
    store.asked.clear()
    source, trace = ChunkSource(loom.decoder, store), Trace()
    supplied = source.supply(prompt.header_ids, prompt.header_ids, prompt.chunk_ids, trace)
    assert next(supplied)[0] == -1
    store.went_on.clear()
    assert next(supplied)[0] == 0
    assert store.went_on.wait(10), "nothing was asked for while chunk 0 is in our hands"
    assert [index for index, _ in supplied] == [1, 2, 3]
    assert len(store.asked) == len(set(store.asked)) == len(trace.lookups) == 5


def test_who_reads_ahead(tmp_path: Path) -> None:
    for store, is_ahead in ((Gated(), True), (f"disk:{tmp_path}", False), ("memory:", False)):
        assert loom_of("llama", store=store).chunks.reads_ahead is is_ahead


def test_a_reading_that_fails_ends_the_supply_and_its_thread() -> None:
    loom = loom_of("llama", store=Gated())
    loom.index(DOCUMENTS)

    def broken(key: str) -> Lookup:
        if threading.current_thread() is threading.main_thread():
            return Gated._find(loom.store, key)
        raise RuntimeError("no such luck")

    loom.store._find = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no such luck"):
        loom.answer(QUESTION, DOCUMENTS, selector=NoRecompute())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvloom-load")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["halves", "interleaved", "partial", "odd", "none"])
def test_moving_by_halves_is_the_matrix_product(kind: str, dtype: torch.dtype) -> None:
    dims, angles = 8, torch.tensor([0.3, 1.1, 2.0, 0.01])
    pairs = {
        "halves": [(d, d + 4) for d in range(4)],
        "interleaved": [(2 * d, 2 * d + 1) for d in range(4)],
        "partial": [(0, 2), (1, 3)],
        "odd": [(0, 3), (1, 4)],
        "none": [],
    }[kind]
    rotation = torch.eye(7 if kind == "odd" else dims)
    for (one, other), angle in zip(pairs, angles, strict=False):
        rotation[one, one] = rotation[other, other] = angle.cos()
        rotation[one, other], rotation[other, one] = angle.sin(), -angle.sin()
    keys = torch.randn(2, 5, len(rotation)).to(dtype)
    before = keys.clone()
    expected = (keys.float() @ rotation).to(dtype)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(Move(rotation)(keys), expected, atol=1e-6, rtol=rtol)
    into = torch.zeros(2, 9, len(rotation), dtype=dtype)
    Move(rotation)(keys, into[:, 2:7])  # a part of a longer buffer, as in a cache
    torch.testing.assert_close(into[:, 2:7], expected, atol=1e-6, rtol=rtol)
    assert not into[:, :2].any()
    assert not into[:, 7:].any()
    assert keys.equal(before)
    assert Move(rotation)._is_by_halves == (kind in ("halves", "none"))
