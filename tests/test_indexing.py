"""Documents by name, from text to chunks in the store."""

from __future__ import annotations

import pytest
from tiny_models import DOCUMENTS, loom_of

from kvloom import prefill
from kvloom.errors import DocumentError
from kvloom.indexing import index_documents
from kvloom.loom import Loom
from kvloom.prompt import Document, PromptFormat
from kvloom.store import MemoryStore, Store
from kvloom.store.documents import documents_of

NAMED = [Document(text, id=f"d{place}") for place, text in enumerate(DOCUMENTS)]


class Bare(MemoryStore):
    """A store of four methods, which keeps no documents."""

    documents = Store.documents


def test_loom_index_records_documents_with_ids_and_no_others() -> None:
    loom = loom_of("llama")
    keys = loom.index([*NAMED[:2], DOCUMENTS[2], NAMED[3]])
    assert keys == loom_of("llama").index(DOCUMENTS)
    assert [document.id for document in loom.store.documents.all()] == ["d0", "d1", "d3"]
    assert loom.store.documents.get("d3").keys == (keys[3],)
    bare = loom_of("llama", store=Bare())
    assert documents_of(bare.store) is None
    assert bare.index(NAMED) == keys
    assert {found.status for found in index_documents(bare, NAMED)} == {"unnamed"}


def test_what_has_not_changed_is_not_tokenized_and_what_is_gone_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loom = loom_of("llama")
    first = index_documents(loom, NAMED, source="a")
    assert [(found.status, found.computed) for found in first] == [("new", found.keys) for found in first]
    assert sum(found.num_tokens for found in first) == sum(found.computed_tokens for found in first)

    with monkeypatch.context() as patch:
        patch.setattr("kvloom.indexing.cut_into_chunks", None)
        for source in ("a", ""):  # who names no source does not take it away
            again = index_documents(loom, NAMED, source=source)
            assert {(found.status, found.source, found.computed) for found in again} == {
                ("unchanged", "a", ())
            }
            assert [found.keys for found in again] == [found.keys for found in first]
    (moved,) = index_documents(loom, NAMED[:1], source="b")
    assert (moved.status, moved.computed, loom.store.documents.get("d0").source) == ("unchanged", (), "b")

    loom.store.delete(first[2].keys[0])
    lost = index_documents(loom, NAMED)
    assert [found.computed for found in lost] == [(), (), first[2].keys, ()]
    assert first[2].keys[0] in loom.store

    (other,) = index_documents(loom, [Document("Another text.", id="d1")])
    assert (other.status, other.change.freed) == ("replaced", first[1].keys)
    shorter = Loom(
        loom.model, loom.tokenizer.raw, store=loom.store, prompt_format=PromptFormat(chunk_tokens=32)
    )
    (recut,) = index_documents(shorter, NAMED[:1])
    assert recut.status == "replaced"
    assert len(recut.keys) > 1


def test_one_id_is_one_document() -> None:
    loom = loom_of("llama")
    with pytest.raises(DocumentError, match="two documents have the id 'a'; give each its own"):
        loom.index([Document("x", "a"), Document("y", "a")])
    with pytest.raises(DocumentError, match="document id 3 is not a line of text; give it one"):
        loom.index([Document("x", 3)])  # type: ignore[arg-type]
    assert list(loom.store.keys()) == []
    keys = loom.index([Document("x", "a"), Document("x", "a")])
    assert keys == [keys[0]] * 2


def test_short_documents_share_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[list[int]] = []
    prefill_pack = prefill._prefill_pack

    def noted(decoder, pack, header, start):
        lengths.append([len(ids) for ids in pack])
        return prefill_pack(decoder, pack, header, start)

    monkeypatch.setattr(prefill, "_prefill_pack", noted)
    monkeypatch.setattr(prefill, "PACKED_TOKENS", 200)
    loom = loom_of("llama")
    documents = [Document(f"Barge {number} carried stone.", id=f"d{number}") for number in range(40)]
    found = index_documents(loom, documents)
    packs = [sum(pack) for pack in lengths[1:]]  # the header is the first
    assert sum(packs) == sum(each.num_tokens for each in found)
    longest = max(each.num_tokens for each in found)
    assert all(200 - longest < tokens <= 200 for tokens in packs[:-1])
    assert len(packs) == -(-sum(packs) // (200 - longest // 2)) or len(packs) < 8
    assert len(loom.store.documents.all()) == 40


def test_a_store_too_small_for_the_documents_says_so() -> None:
    loom = loom_of("llama")
    index_documents(loom, NAMED[:1])
    small = loom_of("llama", store=f"memory:{loom.store.stats().num_bytes + 100}")
    index_documents(small, NAMED[:1])
    assert small.store.documents.get("d0") is not None


def test_progress_counts_the_tokens_to_compute() -> None:
    loom = loom_of("llama")
    loom.index(NAMED[:1])
    progress: list[tuple[int, int]] = []
    found = index_documents(loom, NAMED, on_progress=lambda *done: progress.append(done))
    total = sum(each.num_tokens for each in found[1:])
    assert (progress[0], progress[-1]) == ((0, total), (total, total))
