"""Loom: the straight line from documents to an answer.

documents --prompt--> header | chunks | question
chunk ids --prefill--> ChunkKV --store--> ChunkKV
ChunkKVs --splice--> SplicedCache
SplicedCache + question --Probe--> scores --select--> rows
rows + question --recompute--> SplicedCache, next-token logits
SplicedCache --generate--> Answer
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor

from kvloom import families
from kvloom.chunk_source import ChunkSource
from kvloom.compressors import Compressor, as_compressor, compress
from kvloom.errors import MethodError
from kvloom.generate import AnswerStream, Sampling, SamplingOptions
from kvloom.hf import Decoder, cat_ids
from kvloom.indexing import index_documents
from kvloom.layout import LAYOUTS, ORDERING
from kvloom.loading import load
from kvloom.observe import Observer
from kvloom.probe import Probe
from kvloom.profile import as_selector_for
from kvloom.prompt import Document, Prompt, PromptFormat, check_fits, header_ids
from kvloom.prompt import prompt as build_prompt
from kvloom.recompute import recompute
from kvloom.selectors import Selector, select
from kvloom.splice import announce, leave_out, splice_into
from kvloom.store import Store, open_store
from kvloom.tokenizer import Tokenizer
from kvloom.trace import Answer, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

    from kvloom.answer_options import AnswerOptions, Reorder
    from kvloom.cache import SplicedCache
    from kvloom.verify import Report


class Loom:
    """A model, its tokenizer and a store of chunk KV; answers questions over documents without prefilling
    them again.

    `model` is a transformers causal language model; it is switched to kvloom's attention function, which
    computes the same results. `tokenizer` is any object with `encode`, `decode` and special-token ids.
    `store` is a `Store` or its URL: ``memory:``, ``memory:4GiB``, ``disk:PATH``. A `chunk_compressor` drops
    rows of every chunk before it is stored. Raises ``UnsupportedModel`` for a model whose KV cannot be moved.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        store: str | Store = "memory:",
        prompt_format: PromptFormat | None = None,
        chunk_compressor: Compressor | str | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = Tokenizer(tokenizer)
        self.store = open_store(store)
        self.prompt_format = prompt_format or PromptFormat()
        self.decoder = Decoder(model, tokenizer_identity=self.tokenizer.identity())
        self.rotation_errors = families.check(self.decoder)
        self.chunk_compressor = None if chunk_compressor is None else as_compressor(chunk_compressor)
        self.chunks = ChunkSource(self.decoder, self.store, self.chunk_compressor)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        store: str | Store = "memory:",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        prompt_format: PromptFormat | None = None,
        chunk_compressor: Compressor | str | None = None,
        **model_kwargs: Any,
    ) -> Loom:
        """A Loom over a model folder, a hub name, or "bundled:smollm2", which works offline.

        `dtype` None is float32 on a CPU and the checkpoint's own elsewhere. Raises ``ModelError``.
        """
        model, tokenizer = load(name_or_path, dtype=dtype, device=device, **model_kwargs)
        format, compressor = prompt_format, chunk_compressor
        return cls(model, tokenizer, store=store, prompt_format=format, chunk_compressor=compressor)

    def twin(
        self, *, store: str | Store | None = None, chunk_compressor: Compressor | str | None = None
    ) -> Loom:
        """The same model over another store, or with chunks compressed otherwise; None: as it is here."""
        other = copy.copy(self)
        if store is not None:
            other.store = open_store(store)
        if chunk_compressor is not None:
            other.chunk_compressor = as_compressor(chunk_compressor)
        other.chunks = ChunkSource(other.decoder, other.store, other.chunk_compressor)
        return other

    # --- documents -> chunks -> store

    def index(
        self, documents: Sequence[Document | str], *, on_progress: Callable[[int, int], None] | None = None
    ) -> list[str]:
        """Stores the KV of every chunk of the documents; returns the chunks' keys, in order.

        A chunk that is stored is not computed again. `on_progress(done, total)` counts tokens. Documents with
        ids are recorded in a store that keeps them; see `kvloom.indexing.index_documents`.
        """
        indexed = index_documents(self, documents, on_progress=on_progress)
        return [key for document in indexed for key in document.keys]

    def prefill_header(self) -> Tensor:
        """The tokens behind which chunks are prefilled: the prompt's header, if they share it."""
        is_shared = self.prompt_format.header == "shared"
        return header_ids(self.tokenizer, self.prompt_format) if is_shared else cat_ids([])

    # --- question + documents -> prompt

    def prompt(self, question: str, documents: Sequence[Document | str]) -> Prompt:
        """The token ids of header, chunks and question, the same for every method."""
        return build_prompt(self.tokenizer, self.prompt_format, question, documents)

    def check_length(self, prompt: Prompt, max_new_tokens: int) -> None:
        """Raises ``ContextTooLong``, before any work, when prompt and answer do not fit the model."""
        check_fits(prompt, self.decoder.max_length, max_new_tokens)

    # --- chunks -> spliced cache

    def splice(
        self, prompt: Prompt, *, placement: str = "global", reserve: int = 0, trace: Trace | None = None
    ) -> SplicedCache:
        """The prompt's context from stored chunks, keys at their global positions or another layout's.

        A missing chunk is prefilled and stored. `reserve` is room for rows beyond the question.
        """
        trace = Trace() if trace is None else trace
        self.check_length(prompt, 0)
        layout = LAYOUTS[placement](len(prompt.header_ids), [len(ids) for ids in prompt.chunk_ids])
        behind = self.prefill_header()
        cache, compressed = self.decoder.new_cache(prompt.num_tokens + reserve), []
        announce(cache, prompt.header_ids, prompt.chunk_ids, layout, num_behind=len(behind))
        for index, kv in self.chunks.supply(prompt.header_ids, behind, prompt.chunk_ids, trace):
            header = range(len(prompt.header_ids)), 0
            rows, start = header if index < 0 else (cache.spans[index], layout.starts[index])
            with trace.seconds.clock("splice", self.decoder.synchronize):
                splice_into(self.decoder, cache, rows, start, kv)
            if kv.rows is not None:
                compressed.append((rows, kv.rows))
        leave_out(cache, compressed)
        trace.context_tokens = cache.num_rows
        return cache

    def full_prefill(self, prompt: Prompt, *, reserve: int = 0) -> tuple[SplicedCache, Tensor]:
        """The reference: the cache of the whole prompt, computed at once, and its next-token logits (V,)
        float32.
        """
        self.check_length(prompt, 0)
        cache = self.decoder.new_cache(prompt.num_tokens + reserve)
        positions = torch.arange(prompt.num_tokens)
        logits = self.decoder.forward(prompt.token_ids, positions, cache, num_new=prompt.num_tokens)
        cache.spans = list(prompt.spans)
        cache.exact = torch.ones_like(cache.exact)
        return cache, logits

    # --- spliced cache -> rows -> recomputed cache, logits

    def select(
        self, cache: SplicedCache, prompt: Prompt, selector: Selector | str, *, trace: Trace | None = None
    ) -> Tensor:
        """(S,) int64 ascending: the context rows that the selector would recompute; the cache is left as it
        was.
        """
        chosen = as_selector_for(self.decoder, selector)
        return self._select(cache, prompt, chosen, Trace() if trace is None else trace)[0]

    def _select(
        self, cache: SplicedCache, prompt: Prompt, selector: Selector, trace: Trace
    ) -> tuple[Tensor, Probe]:
        cache.check_holds(prompt.context_ids)
        with trace.seconds.clock("score", self.decoder.synchronize):
            probe = Probe(
                self.decoder,
                cache,
                prompt.question_ids,
                prompt.question_span,
                respliced=lambda geometry: self.splice(prompt, placement=geometry),
            )
            rows = select(selector, probe)
        trace.token_layers += probe.cost
        return rows, probe

    def reorder(
        self,
        prompt: Prompt,
        selector: Selector | str,
        *,
        by: Literal["documents", "chunks"] = "documents",
        trace: Trace | None = None,
    ) -> Prompt:
        """The prompt with its chunks in the order that the selector prefers, the best next to the question.

        By documents, the chunks of one document stay together and in order. Raises ``MethodError`` for a
        selector that has no order.
        """
        if by not in ("documents", "chunks"):
            raise MethodError(f"by must be 'documents' or 'chunks', got {by!r}")
        trace = Trace() if trace is None else trace
        with trace.seconds.clock("score", self.decoder.synchronize):
            probe = Probe(
                self.decoder,
                self.splice(prompt, placement=ORDERING),
                prompt.question_ids,
                prompt.question_span,
                geometry=ORDERING,
                groups=prompt.groups if by == "documents" else None,
            )
            trace.chunk_order = as_selector_for(self.decoder, selector).order(probe)
        trace.token_layers += probe.cost
        return prompt.reordered(trace.chunk_order)

    def recompute(
        self,
        cache: SplicedCache,
        rows: Tensor,
        prompt: Prompt,
        *,
        trace: Trace | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """(V,) float32 next-token logits; the rows hold fresh KV and the question's rows are in the cache.

        An `observer` of the cache runs the question, and records it. Raises ``ValueError`` for a cache that
        does not hold the prompt's context and nothing else.
        """
        cache.check_holds(prompt.context_ids)
        trace = Trace() if trace is None else trace
        with trace.seconds.clock("recompute", self.decoder.synchronize):
            logits = recompute(self.decoder, cache, rows, prompt.question_ids, observer)
        assert logits is not None, "there is a question"
        trace.recomputed_rows += len(rows)
        trace.rows += rows.tolist()
        trace.token_layers += (len(rows) + len(prompt.question_ids)) * self.decoder.num_layers
        return logits

    # --- all of it

    def prepare(
        self,
        prompt: Prompt,
        selector: Selector,
        *,
        reorder: Reorder = False,
        compressor: Compressor | None = None,
        reserve: int = 0,
        trace: Trace | None = None,
    ) -> tuple[SplicedCache, Tensor]:
        """The cache of context and question by the given method, and the next-token logits (V,) float32.

        `reserve` is room for the rows of an answer. All that the trace says before decoding is filled in
        here. A `compressor` then drops rows of context and question.
        """
        observer = None
        trace = Trace() if trace is None else trace
        trace.method, trace.question_tokens = repr(selector), len(prompt.question_ids)
        if selector.reuses:
            prompt, cache, rows = self._choose(prompt, selector, reorder, reserve, trace)
            if compressor is not None:
                observer = Observer(self.decoder, cache, compressor.records)
            logits = self.recompute(cache, rows, prompt, trace=trace, observer=observer)
        else:
            with trace.seconds.clock("recompute", self.decoder.synchronize):
                if compressor is None:
                    cache, logits = self.full_prefill(prompt, reserve=reserve)
                else:
                    cache = self.decoder.new_cache(prompt.num_tokens + reserve)
                    observer = Observer(self.decoder, cache, compressor.records)
                    logits = observer.run(prompt.token_ids)
            trace.context_tokens = trace.recomputed_rows = len(prompt.context_ids)
            trace.rows = list(range(trace.context_tokens))
            trace.token_layers = prompt.num_tokens * self.decoder.num_layers
        if compressor is not None and observer is not None:
            with trace.seconds.clock("compress", self.decoder.synchronize):
                trace.compressions.append(compress(compressor, cache, observer).as_dict())
        trace.kv_bytes = cache.num_bytes
        return cache, logits

    def _choose(
        self, prompt: Prompt, selector: Selector, reorder: Reorder, reserve: int, trace: Trace
    ) -> tuple[Prompt, SplicedCache, Tensor]:
        """The prompt as read, its spliced cache and the rows of it to recompute (S,), with the layers that
        the method computes in full.
        """
        if reorder not in (False, True, "chunks"):
            raise MethodError(f"reorder must be True, False or 'chunks', got {reorder!r}")
        if reorder:
            by = "documents" if reorder is True else reorder
            prompt = self.reorder(prompt, selector, by=by, trace=trace)
        cache = self.splice(prompt, placement=selector.placement, reserve=reserve, trace=trace)
        rows, probe = self._select(cache, prompt, selector, trace)
        if selector.fresh_layers and len(rows):
            with trace.seconds.clock("score", self.decoder.synchronize):
                for layer, (keys, values) in enumerate(probe.fresh(selector.fresh_layers)):
                    cache.write_held(layer, keys, values)
        return prompt, cache, rows

    def context(
        self,
        question: str,
        documents: Sequence[Document | str],
        *,
        selector: Selector | str = "infoflow",
        reorder: Reorder = False,
    ) -> SplicedCache:
        """The repaired context without the question, for
        ``model.generate(**cache.generate_kwargs(question_ids))``.
        """
        prompt, selector = self.prompt(question, documents), as_selector_for(self.decoder, selector)
        self.check_length(prompt, 1)
        if selector.reuses:
            _, cache, rows = self._choose(prompt, selector, reorder, 0, Trace())
            recompute(self.decoder, cache, rows)
            return cache
        cache, _ = self.full_prefill(prompt)
        cache.truncate(len(prompt.context_ids))
        return cache

    def stream(
        self,
        question: str,
        documents: Sequence[Document | str],
        *,
        selector: Selector | str = "infoflow",
        options: Mapping[str, Any] | None = None,
        reorder: Reorder = False,
        compressor: Compressor | str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """The answer as an iterator of text pieces; its `answer` is complete when the iterator is.

        The context is prepared before this returns. For the options see `AnswerOptions`.
        """
        chosen, wanted = as_selector_for(self.decoder, selector, options), Sampling.of(sampling)
        prompt, trace = self.prompt(question, documents), Trace()
        self.check_length(prompt, wanted.max_new_tokens)
        cache, logits = self.prepare(
            prompt,
            chosen,
            reorder=reorder,
            compressor=None if compressor is None else as_compressor(compressor),
            reserve=wanted.max_new_tokens,
            trace=trace,
        )
        return AnswerStream(self.decoder, self.tokenizer, cache, logits, wanted, trace)

    def answer(
        self, question: str, documents: Sequence[Document | str], **options: Unpack[AnswerOptions]
    ) -> Answer:
        """The answer to the question over the documents, in the order given unless `reorder` asks for
        another.
        """
        return self.stream(question, documents, **options).finish()

    def generate(
        self,
        prompt: str | Tensor,
        *,
        compressor: Compressor | str | None = None,
        decode_compressor: Compressor | str | None = None,
        **options: Any,
    ) -> Answer:
        """The answer to a prompt without documents, over a cache that is compressed; see
        `kvloom.long_answer.generate` for the options.
        """
        from kvloom.long_answer import generate

        return generate(
            self, prompt, compressor=compressor, decode_compressor=decode_compressor, **options
        ).finish()

    def verify(self, questions: Sequence[str], documents: Sequence[Document | str], **options: Any) -> Report:
        """Whether reuse is right on this model and these documents; see `kvloom.verify.verify` for the
        options.
        """
        from kvloom.verify import verify

        return verify(self, questions, documents, **options)
