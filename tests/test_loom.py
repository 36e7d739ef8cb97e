from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from tiny_models import DOCUMENTS, FAMILIES, FLOAT32, QUESTION, build, difference, loom_of

from kvloom.attention import Packed
from kvloom.errors import ContextTooLong, DocumentError, MethodError, PromptError, StoreError
from kvloom.kv import ChunkKV
from kvloom.loom import Loom
from kvloom.prompt import Document, PromptFormat
from kvloom.selectors import InfoFlow, NoRecompute
from kvloom.store import open_store
from kvloom.store.memory import MemoryStore
from kvloom.trace import Trace


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.put_keys: list[str] = []

    def put(self, key: str, kv: ChunkKV) -> None:
        self.put_keys.append(key)
        super().put(key, kv)


def test_index_computes_each_chunk_once() -> None:
    store = CountingStore()
    loom = loom_of("llama", store=store)
    progress: list[tuple[int, int]] = []
    keys = loom.index([*DOCUMENTS, DOCUMENTS[0]], on_progress=lambda *p: progress.append(p))
    assert len(keys) == 5
    assert keys[4] == keys[0]
    assert len(set(keys)) == 4
    assert len(store.put_keys) == 5, "four chunks and the header"
    lengths = [len(document) + 2 for document in DOCUMENTS]
    assert progress == [(sum(lengths[:count]), sum(lengths)) for count in range(5)], "chunk by chunk"
    assert loom.index(DOCUMENTS) == keys[:4]
    assert loom.index(["new", *DOCUMENTS])[1:] == keys[:4]
    assert len(store.put_keys) == 6


def test_an_interrupted_index_keeps_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.prefill.PACKED_TOKENS", 60)
    store = CountingStore()
    loom = loom_of("llama", store=store)

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loom.index(DOCUMENTS, on_progress=interrupt)
    stored = len(store.put_keys)
    assert 1 < stored < 5
    loom.index(DOCUMENTS)
    assert len(store.put_keys) == 5


def test_packing_changes_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, alone = loom_of("qwen3"), loom_of("qwen3")
    prompt = packed.prompt(QUESTION, DOCUMENTS)
    keys = packed.index(DOCUMENTS)
    monkeypatch.setattr("kvloom.prefill.PACKED_TOKENS", 1)
    assert alone.index(DOCUMENTS) == keys
    for key, ids in zip(keys, prompt.chunk_ids, strict=True):
        one, other = packed.store.get(key), alone.store.get(key)
        assert one is not None
        assert other is not None
        assert torch.equal(one.token_ids, ids)
        for layer in range(3):
            assert difference(one.keys[layer], other.keys[layer]) < FLOAT32
            assert difference(one.values[layer], other.values[layer]) < FLOAT32


def test_trace_tells_what_was_reused_and_what_it_cost(llama_loom: Loom) -> None:
    loom = loom_of("llama")
    loom.index(DOCUMENTS[:3])
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    trace = loom.answer(QUESTION, DOCUMENTS, selector=InfoFlow(ratio=0.2), max_new_tokens=4).trace
    assert trace.method == repr(InfoFlow(ratio=0.2))
    assert trace.context_tokens == len(prompt.context_ids)
    assert trace.prefilled_tokens == len(prompt.chunk_ids[3])
    assert trace.reused_tokens == trace.context_tokens - trace.prefilled_tokens
    rows = int(0.2 * trace.context_tokens)
    assert trace.recomputed_rows == rows
    num_question = len(prompt.question_ids)
    assert trace.question_tokens == num_question
    assert trace.token_layers == (rows + num_question) * 3 + len(prompt.question_ids) * 3
    per_token = 3 * 2 * 2 * 16 * 4
    assert trace.kv_bytes == prompt.num_tokens * per_token
    seconds = trace.seconds
    assert min(seconds.load, seconds.prefill, seconds.splice, seconds.score, seconds.recompute) > 0
    assert seconds.ttft == pytest.approx(
        sum(
            trace.as_dict()["seconds"][s]
            for s in ("load", "prefill", "splice", "score", "recompute", "first_token")
        )
    )
    assert seconds["decode"] == seconds.decode > 0
    again = loom.answer(QUESTION, DOCUMENTS, selector=InfoFlow(ratio=0.2), max_new_tokens=4).trace
    assert (again.prefilled_tokens, again.seconds.prefill) == (0, 0)
    full = loom.answer(QUESTION, DOCUMENTS, selector="full", max_new_tokens=4).trace
    assert (full.reused_tokens, full.recomputed_rows) == (0, full.context_tokens)
    assert full.token_layers == prompt.num_tokens * 3


def test_selector_by_name_with_options_as_data(llama_loom: Loom) -> None:
    by_name = llama_loom.answer(
        QUESTION, DOCUMENTS, selector="infoflow", options={"ratio": "0.3"}, max_new_tokens=2
    )
    assert by_name.trace.method == repr(InfoFlow(ratio=0.3))
    with pytest.raises(MethodError, match="did you mean 'epic'"):
        llama_loom.answer(QUESTION, DOCUMENTS, selector="epik")
    with pytest.raises(TypeError, match="an instance has its own"):
        llama_loom.answer(QUESTION, DOCUMENTS, selector=InfoFlow(), options={"ratio": 0.3})


def test_any_order_of_documents_is_reused() -> None:
    loom = loom_of("llama")
    loom.index(DOCUMENTS)
    for order in ([3, 2, 1, 0], [1, 3], [2, 2, 0]):
        documents = [DOCUMENTS[index] for index in order]
        prompt = loom.prompt(QUESTION, documents)
        trace = loom.answer(QUESTION, documents, max_new_tokens=2).trace
        assert trace.prefilled_tokens == 0
        full, expected = loom.full_prefill(prompt)
        cache = loom.splice(prompt)
        logits = loom.recompute(cache, (~cache.exact).nonzero().flatten(), prompt)
        assert difference(logits, expected) < FLOAT32
        assert full.spans == cache.spans == prompt.spans


def test_a_duplicate_that_is_missing_is_computed_once() -> None:
    store = CountingStore()
    loom = loom_of("llama", store=store)
    prompt = loom.prompt(QUESTION, [DOCUMENTS[0], DOCUMENTS[0]])
    cache = loom.splice(prompt)
    assert len(store.put_keys) == 2
    first, second = prompt.spans
    assert torch.equal(
        cache.values(2)[:, first.start : first.stop], cache.values(2)[:, second.start : second.stop]
    )


@pytest.mark.parametrize("bos", ["<s>", None])
def test_without_a_shared_header_chunks_are_prefilled_alone(bos: str | None) -> None:
    """Then the first chunk is exact only if there is no header at all; recompute-all is exact in any case."""
    loom = loom_of("llama", tokenizer=ByteTokenizer(bos_token=bos), prompt_format=PromptFormat(header="none"))
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    cache = loom.splice(prompt)
    assert int(cache.exact.sum()) == (1 if bos else len(prompt.chunk_ids[0]))
    _, expected = loom.full_prefill(prompt)
    logits = loom.recompute(cache, (~cache.exact).nonzero().flatten(), prompt)
    assert difference(logits, expected) < FLOAT32
    shared = loom_of("llama", tokenizer=ByteTokenizer(bos_token=bos))
    assert (shared.index(DOCUMENTS) == loom.index(DOCUMENTS)) == (bos is None)


def test_a_chat_template_makes_the_header(tmp_path: Any) -> None:
    template = "<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant:"
    loom = loom_of("llama", tokenizer=ByteTokenizer(template))
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    text = loom.tokenizer.decode(prompt.token_ids.tolist(), skip_special=False)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant:")
    assert len(prompt.header_ids) > 10
    _, expected = loom.full_prefill(prompt)
    cache = loom.splice(prompt)
    assert difference(loom.recompute(cache, (~cache.exact).nonzero().flatten(), prompt), expected) < FLOAT32


def test_a_long_document_is_several_chunks_with_known_spans() -> None:
    loom = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=64))
    document = Document(" ".join(DOCUMENTS), id="all")
    prompt = loom.prompt(QUESTION, [document, DOCUMENTS[0][:20]])
    assert len(prompt.chunk_ids) > 2
    assert max(map(len, prompt.chunk_ids)) <= 64
    assert prompt.document_spans == [range(1, prompt.spans[-1].start), prompt.spans[-1]]
    assert loom.answer(QUESTION, [document], max_new_tokens=2).trace.context_tokens == prompt.spans[-1].start


def test_context_too_long_is_said_before_any_work() -> None:
    store = CountingStore()
    loom = loom_of("llama", store=store)
    documents = [f"{number} " + "word " * 100 for number in range(5)]
    with pytest.raises(ContextTooLong) as error:
        loom.answer(QUESTION, documents)
    assert str(error.value) == "prompt has 2,559 tokens, model takes 2,048: give fewer documents or --top 3"
    assert store.put_keys == []
    with pytest.raises(
        ContextTooLong,
        match="and the answer may have 2,000, model takes 2,048: ask for at most 1,505 new tokens",
    ):
        loom.answer(QUESTION, documents[:1], max_new_tokens=2000)
    with pytest.raises(ContextTooLong, match="give a shorter document or question"):
        loom.answer(QUESTION, ["word " * 1000])
    with pytest.raises(ContextTooLong):
        loom.splice(loom.prompt(QUESTION, documents))
    with pytest.raises(ContextTooLong):
        loom.full_prefill(loom.prompt(QUESTION, documents))


@pytest.mark.parametrize(
    ("question", "documents", "error"),
    [
        ("", DOCUMENTS, PromptError),
        ("  \n", DOCUMENTS, PromptError),
        ("q", [], DocumentError),
        ("q", [""], DocumentError),
    ],
)
def test_nothing_to_ask_or_to_read_is_refused(
    llama_loom: Loom, question: str, documents: list[str], error: type
) -> None:
    with pytest.raises(error):
        llama_loom.answer(question, documents)


@pytest.mark.parametrize(
    "documents", [None, 3, {"a": "text"}, "one text", ["half \ud800"], [3], [Document("a", title=3)]]
)  # type: ignore[arg-type]
def test_what_is_not_a_list_of_documents_is_refused(llama_loom: Loom, documents: Any) -> None:
    with pytest.raises(DocumentError):
        llama_loom.answer(QUESTION, documents)


@pytest.mark.parametrize("question", [None, 3, "half \ud800"])
def test_what_is_not_a_question_is_refused(llama_loom: Loom, question: Any) -> None:
    with pytest.raises(PromptError):
        llama_loom.answer(question, DOCUMENTS)


@pytest.mark.parametrize("selector", [None, 3, InfoFlow])
def test_what_is_not_a_selector_is_refused(llama_loom: Loom, selector: Any) -> None:
    with pytest.raises(MethodError, match="a selector is a name or an instance"):
        llama_loom.answer(QUESTION, DOCUMENTS, selector=selector)


def test_an_unknown_reorder_is_refused(llama_loom: Loom) -> None:
    with pytest.raises(MethodError, match="reorder must be True, False or 'chunks'"):
        llama_loom.answer(QUESTION, DOCUMENTS, reorder="document")  # type: ignore[arg-type]


def test_a_chunk_that_no_prompt_could_hold_is_not_indexed() -> None:
    loom = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=4000))
    with pytest.raises(ContextTooLong, match="give a smaller chunk_tokens"):
        loom.index(["word " * 700])


def test_what_another_process_stored_meanwhile_is_not_computed_again() -> None:
    class Racing(CountingStore):
        """Another process stores the second pack while this one computes the first."""

        def put(self, key: str, kv: ChunkKV) -> None:
            super().put(key, kv)
            if len(self.put_keys) == 2:
                for other in keys[1:]:
                    self.put_keys.append("theirs")
                    MemoryStore.put(self, other, theirs[other])

    helper = loom_of("llama")
    keys = helper.index(DOCUMENTS)
    theirs = {key: kv for key in keys if (kv := helper.store.get(key)) is not None}
    store = Racing()
    loom = loom_of("llama", store=store)
    progress: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvloom.prefill.PACKED_TOKENS", 1)
        loom.index(DOCUMENTS, on_progress=lambda done, _: progress.append(done))
    assert store.put_keys == [store.put_keys[0], keys[0], "theirs", "theirs", "theirs"]
    assert progress[-1] == sum(len(document) + 2 for document in DOCUMENTS)


# --- the store in the line


def test_a_disk_store_serves_another_process_worth_of_looms(tmp_path: Any) -> None:
    expected = loom_of("llama", store=f"disk:{tmp_path}").answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert expected.trace.prefilled_tokens == expected.trace.context_tokens
    answer = loom_of("llama", store=f"disk:{tmp_path}").answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert answer.trace.prefilled_tokens == 0
    assert answer.token_ids == expected.token_ids


def test_another_model_in_the_same_store_never_meets_these_entries(tmp_path: Any) -> None:
    loom_of("llama", store=f"disk:{tmp_path}").index(DOCUMENTS)
    for other in (
        Loom(build(FAMILIES["llama"], seed=1), ByteTokenizer(), store=f"disk:{tmp_path}"),
        Loom(build(FAMILIES["llama"]).bfloat16(), ByteTokenizer(), store=f"disk:{tmp_path}"),
    ):
        trace = other.answer(QUESTION, DOCUMENTS, max_new_tokens=2).trace
        assert trace.reused_tokens == 0


def test_a_damaged_entry_costs_exactly_itself(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    loom = loom_of("llama", store=f"disk:{tmp_path}")
    keys = loom.index(DOCUMENTS)
    expected = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    file = next(tmp_path.rglob(f"{keys[2]}*"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        answer = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert answer.trace.prefilled_tokens == len(loom.prompt(QUESTION, DOCUMENTS).chunk_ids[2])
    assert [record for record in caplog.records if keys[2][:8] in record.getMessage()]
    assert loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4).trace.prefilled_tokens == 0


def test_an_entry_of_another_model_or_chunk_is_rejected_and_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loom = loom_of("llama")
    keys = loom.index(DOCUMENTS)
    good = loom.store.get(keys[1])
    other = loom.store.get(keys[2])
    assert good is not None
    assert other is not None
    wrong = {
        "computed by another model": ChunkKV(good.token_ids, good.keys, good.values, "f" * 64, good.start),
        "another chunk": other,
        "model's shape": ChunkKV(
            good.token_ids, good.keys[:2], good.values[:2], good.fingerprint, good.start
        ),
        "are not torch.float32": ChunkKV(
            good.token_ids, tuple(k.half() for k in good.keys), good.values, good.fingerprint, good.start
        ),
    }
    expected = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4).token_ids
    for reason, kv in wrong.items():
        loom.store.put(keys[1], kv)
        caplog.clear()
        answer = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
        assert answer.token_ids == expected
        assert answer.trace.prefilled_tokens == good.num_tokens, reason
        assert reason in caplog.text


class FullStore(MemoryStore):
    def put(self, key: str, kv: ChunkKV) -> None:
        raise StoreError("cannot write to the store: no space left on device")


def test_a_store_that_cannot_be_written_fails_an_index_and_not_an_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loom = loom_of("llama", store=FullStore())
    with pytest.raises(StoreError, match="no space left"):
        loom.index(DOCUMENTS)
    answer = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert answer.token_ids == loom_of("llama").answer(QUESTION, DOCUMENTS, max_new_tokens=4).token_ids
    assert "no space left" in caplog.text


def test_a_store_too_small_for_the_chunks_still_answers() -> None:
    loom = loom_of("llama", store=open_store("memory:20KB"))
    loom.index(DOCUMENTS)
    answer = loom.answer(QUESTION, DOCUMENTS, max_new_tokens=4)
    assert answer.trace.prefilled_tokens > 0
    assert answer.token_ids == loom_of("llama").answer(QUESTION, DOCUMENTS, max_new_tokens=4).token_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: torch.dtype, tmp_path: Any) -> None:
    loom = Loom(build(FAMILIES["llama"]).to(dtype), ByteTokenizer(), store=f"disk:{tmp_path}")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    full, expected = loom.full_prefill(prompt)
    cache = loom.splice(prompt)
    assert cache.keys(0).dtype == dtype
    logits = loom.recompute(cache, (~cache.exact).nonzero().flatten(), prompt)
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert difference(logits, expected) < tolerance
    for layer in range(3):
        assert difference(cache.keys(layer).float(), full.keys(layer).float()) < tolerance


# --- reordering and layouts


def test_reordering_reads_the_documents_in_the_methods_order() -> None:
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    reordered = loom.reorder(prompt, InfoFlow(ratio=0.2))
    order = list(reordered.chunk_documents)
    assert sorted(order) == [0, 1, 2, 3]
    assert order != [0, 1, 2, 3], "this case could not fail"
    answer = loom.answer(QUESTION, DOCUMENTS, reorder=True, selector=InfoFlow(ratio=0.2), max_new_tokens=6)
    by_hand = loom.answer(
        QUESTION, [DOCUMENTS[i] for i in order], selector=InfoFlow(ratio=0.2), max_new_tokens=6
    )
    assert answer.token_ids == by_hand.token_ids
    assert answer.trace.chunk_order == order
    scoring = len(prompt.question_ids) * 3
    assert answer.trace.token_layers == by_hand.trace.token_layers + scoring


def test_chunks_of_one_document_keep_their_order_unless_asked() -> None:
    loom = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=48))
    prompt = loom.prompt(QUESTION, ["\n\n".join(DOCUMENTS), DOCUMENTS[0]])
    count = len(prompt.chunk_ids)
    assert count > 4
    whole = loom.reorder(prompt, InfoFlow(ratio=0.2))
    assert list(whole.chunk_documents) in (
        sorted(whole.chunk_documents),
        sorted(whole.chunk_documents, reverse=True),
    )
    for document in (0, 1):
        own = [ids for ids, d in zip(whole.chunk_ids, whole.chunk_documents, strict=True) if d == document]
        before = [
            ids for ids, d in zip(prompt.chunk_ids, prompt.chunk_documents, strict=True) if d == document
        ]
        assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    trace = Trace()
    loom.reorder(prompt, InfoFlow(ratio=0.2), by="chunks", trace=trace)
    assert sorted(trace.chunk_order) == list(range(count))


def test_the_identity_order_changes_nothing() -> None:
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    order = list(loom.reorder(prompt, "infoflow").chunk_documents)
    documents = [DOCUMENTS[index] for index in order]
    again = loom.reorder(loom.prompt(QUESTION, documents), "infoflow")
    if list(again.chunk_documents) == [0, 1, 2, 3]:
        reordered = loom.answer(QUESTION, documents, reorder=True, max_new_tokens=4)
        assert reordered.token_ids == loom.answer(QUESTION, documents, max_new_tokens=4).token_ids
    same = prompt.reordered(range(4))
    assert torch.equal(same.token_ids, prompt.token_ids)
    with pytest.raises(PromptError, match="each of 4 chunks once"):
        prompt.reordered([0, 1, 2, 2])
    with pytest.raises(MethodError, match="epic does not reorder"):
        loom.answer(QUESTION, DOCUMENTS, selector="epic", reorder=True)


@pytest.mark.parametrize(
    ("layout", "distance"), [("pcw", "longest"), ("composite", "total"), ("global", "total")]
)
def test_layouts_without_recompute(layout: Any, distance: str) -> None:
    """The oracle packs the chunks into one forward at their positions, so no key is moved there."""
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    lengths = [len(ids) for ids in prompt.chunk_ids]
    cache, logits = loom.prepare(prompt, NoRecompute(layout=layout))
    end = 1 + (max(lengths) if distance == "longest" else sum(lengths))
    assert cache.positions[len(prompt.context_ids)] == end
    if layout == "global":
        return
    packed = loom.decoder.new_cache(prompt.num_tokens)
    loom.decoder.fill(prompt.header_ids, torch.arange(1), packed, num_new=1)
    ids = torch.cat(prompt.chunk_ids)
    positions = torch.cat([1 + torch.arange(length) for length in lengths])
    loom.decoder.fill(ids, positions, packed, num_new=len(ids), plan=lambda _: Packed(lengths))
    places = end + torch.arange(len(prompt.question_ids))
    expected = loom.decoder.forward(prompt.question_ids, places, packed, num_new=len(places))
    assert difference(logits, expected) < FLOAT32
