"""ChunkSource: the KV of chunks by their token ids, from the store where it has them, computed and stored
where not.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from kvloom.compressors.chunks import prefill_compressed
from kvloom.errors import ContextTooLong, StoreError
from kvloom.hf import Decoder, cat_ids
from kvloom.prefill import packs, prefill
from kvloom.store.lookup import Lookup, Miss
from kvloom.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from kvloom.compressors import Compressor
    from kvloom.kv import ChunkKV
    from kvloom.store import Store

logger = logging.getLogger(__name__)

_PRICED_TOKENS = 32  # a prefill of fewer says little about the speed of a longer one


class ChunkSource:
    """Chunks of one decoder in one store. An entry that is not what its key says is rejected and computed
    again.
    """

    def __init__(self, decoder: Decoder, store: Store, compressor: Compressor | None = None) -> None:
        self.decoder = decoder
        self.store = store
        # Reading from page cache is work for the same cores that splice: there it pays for devices only.
        self.reads_ahead = store.is_remote or (decoder.device.type != "cpu" and not store.is_immediate)
        self.compressor = compressor  # drops rows of every chunk before it is stored; the header stays whole

    def key(self, header_ids: Tensor, chunk_ids: Tensor) -> str:
        """The store key of a chunk that was prefilled behind the header."""
        compressor = "" if self.compressor is None else repr(self.compressor)
        return self.store.chunk_key(self.decoder.fingerprint, header_ids, chunk_ids, compressor=compressor)

    def _prefill(self, chunks: Sequence[Tensor], header: ChunkKV | None) -> Iterator[ChunkKV]:
        if self.compressor is None:
            return prefill(self.decoder, chunks, header)
        header_ids = cat_ids([]) if header is None else header.token_ids
        return prefill_compressed(self.decoder, chunks, header_ids, self.compressor)

    def check_lengths(self, header_ids: Tensor, chunks: Sequence[Tensor]) -> None:
        """Raises ``ContextTooLong`` for a chunk that the model cannot take behind the header."""
        longest, limit = len(header_ids) + max(map(len, chunks)), self.decoder.max_length
        if limit is not None and longest > limit:
            raise ContextTooLong(
                f"a chunk has {longest:,} tokens with the prompt's header, model takes {limit:,}: "
                "give a smaller chunk_tokens"
            )

    def compute(
        self, header_ids: Tensor, chunks: Mapping[str, Tensor], on_done: Callable[[int], None] | None = None
    ) -> None:
        """The chunks, token ids (T,) under their keys, are stored, and so is the header.

        One that another process stores meanwhile is not computed. A chunk is stored as soon as it is
        computed, so an interrupted run continues where it stopped; `on_done` gets its tokens. Raises
        ``StoreError`` when the store cannot be written.
        """
        if not chunks:
            return
        header = self._header(header_ids, Trace(), must_store=True)
        names = list(chunks)
        for pack in packs([len(ids) for ids in chunks.values()]):
            here = {names[place]: chunks[names[place]] for place in pack}
            left = {key: ids for key, ids in here.items() if key not in self.store}
            if on_done is not None and len(left) < len(here):
                on_done(sum(len(ids) for key, ids in here.items() if key not in left))
            for key, kv in zip(left, self._prefill(list(left.values()), header), strict=True):
                self.store.put(key, kv)
                if on_done is not None:
                    on_done(kv.num_tokens)

    def supply(
        self, header_ids: Tensor, behind: Tensor, chunks: Sequence[Tensor], trace: Trace
    ) -> Iterator[tuple[int, ChunkKV]]:
        """(index, KV) of the header, as index -1 unless it is empty, and of every chunk prefilled behind
        `behind`, the header or nothing; stored chunks come first.

        While the caller works on one chunk, the next is read on a thread, if `reads_ahead`.

        A chunk that the store does not have costs its own prefill and nothing else. Seconds and tokens go to
        `trace`.
        """
        header = self._header(header_ids, trace)
        if header is not None:
            yield -1, header
        keys = [self.key(behind, ids) for ids in chunks]
        missing: dict[str, list[int]] = {}
        with ThreadPoolExecutor(1, "kvloom-load") as reader:
            coming: Future[Lookup] | None = None
            for index, (key, ids) in enumerate(zip(keys, chunks, strict=True)):
                kv = None if key in missing else self._stored(key, ids, len(behind), trace, coming)
                if kv is None:
                    missing.setdefault(key, []).append(index)
                coming, after = None, index + 1
                if self.reads_ahead and after < len(keys) and keys[after] not in missing:
                    coming = reader.submit(self.store.lookup, keys[after], num_tokens=len(chunks[after]))
                if kv is not None:
                    trace.reused_tokens += kv.num_tokens
                    yield index, kv
        for key, kv in self._computed(missing, chunks, header if len(behind) else None, trace):
            for index in missing[key]:
                yield index, kv

    def _computed(
        self, missing: dict[str, list[int]], chunks: Sequence[Tensor], header: ChunkKV | None, trace: Trace
    ) -> Iterator[tuple[str, ChunkKV]]:
        computed = self._prefill([chunks[indices[0]] for indices in missing.values()], header)
        for key in missing:
            with trace.seconds.clock("prefill", self.decoder.synchronize):
                start = time.perf_counter()
                kv = next(computed)
                self._price(kv.num_tokens, time.perf_counter() - start)
                self._store_if_possible(key, kv, trace)
            trace.prefilled_tokens += kv.num_tokens * len(missing[key])
            yield key, kv

    def _price(self, num_tokens: int, seconds: float) -> None:
        """Tells the store what a chunk costs to compute, which is what it may cost to load."""
        if num_tokens >= _PRICED_TOKENS and seconds > 0:
            self.store.set_prefill_speed(num_tokens / seconds)

    def _header(self, header_ids: Tensor, trace: Trace, *, must_store: bool = False) -> ChunkKV | None:
        if len(header_ids) == 0:
            return None
        key = self.store.chunk_key(self.decoder.fingerprint, cat_ids([]), header_ids)
        kv = self._stored(key, header_ids, 0, trace)
        if kv is not None:
            trace.reused_tokens += kv.num_tokens
            return kv
        with trace.seconds.clock("prefill", self.decoder.synchronize):
            kv = next(prefill(self.decoder, [header_ids]))
            if must_store:
                self.store.put(key, kv)
            else:
                self._store_if_possible(key, kv, trace)
        trace.prefilled_tokens += kv.num_tokens
        return kv

    def _stored(
        self, key: str, ids: Tensor, start: int, trace: Trace, coming: Future[Lookup] | None = None
    ) -> ChunkKV | None:
        """The entry, asked for already if it is `coming`, if it is there and right; else None."""
        with trace.seconds.clock("load", self.decoder.synchronize):
            found = self.store.lookup(key, num_tokens=len(ids)) if coming is None else coming.result()
        kv = found.kv
        reason = "" if kv is None else self._fault(kv, ids, start)
        if reason:
            self.store.reject(key, reason)
            found = replace(found, kv=None, reason=Miss.DAMAGED, detail=reason)
        if found.reason in (Miss.NEVER_STORED, Miss.UNKNOWN):
            found = replace(found, reason=self._difference(ids) or found.reason)
        trace.lookups.append(found.as_dict() | {"num_tokens": len(ids)})
        return found.kv

    def _difference(self, ids: Tensor) -> Miss | None:
        """What sets the chunk asked for apart from the nearest that is stored of the same tokens."""
        kin = self.store.kin(ids)
        compressor = "" if self.compressor is None else repr(self.compressor)
        ours = [entry for entry in kin if entry.fingerprint == self.decoder.fingerprint]
        if not ours:
            return Miss.OTHER_MODEL if kin else None
        alike = [entry for entry in ours if entry.compressor == compressor]
        return Miss.OTHER_HEADER if alike else Miss.OTHER_COMPRESSOR

    def _fault(self, kv: ChunkKV, ids: Tensor, start: int) -> str:
        """Why the entry is not the chunk asked for; empty when it is."""
        if kv.fingerprint != self.decoder.fingerprint:
            return "it was computed by another model"
        if kv.start != start or not kv.token_ids.equal(ids):
            return "it holds another chunk than its key says"
        shapes = [
            (*key.shape[::2], value.shape[0], value.shape[2])
            for key, value in zip(kv.keys, kv.values, strict=True)
        ]
        if shapes != [(s.num_heads, s.key_dim, s.num_heads, s.value_dim) for s in self.decoder.kv_shapes]:
            return "its keys and values do not have this model's shape"
        if any(tensor.dtype != self.decoder.dtype for tensor in (*kv.keys, *kv.values)):
            return f"its keys and values are not {self.decoder.dtype}"
        return ""

    def _store_if_possible(self, key: str, kv: ChunkKV, trace: Trace) -> None:
        """Stores for the next question; a store that cannot be written costs this one nothing but a
        warning. An entry that could not be read stays, for who can.
        """
        if any(found["key"] == key and found["reason"] == Miss.UNREADABLE for found in trace.lookups):
            return
        try:
            self.store.put(key, kv)
        except StoreError as error:
            logger.warning("a computed chunk was not stored: %s", error)
