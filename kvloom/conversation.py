"""Conversation: a prompt or several, one cache, compressed after each prompt and while answers grow.

prompt ids --observe--> cache with signals --compress--> smaller cache --step--> answer

`Loom.generate` is the way in. A conversation can be saved and taken up again by the same model.
"""

from __future__ import annotations

import json
import uuid
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from kvloom.compressors import Compression, Compressor, Decoding, Growing, compress
from kvloom.errors import ContextTooLong, MethodError, PromptError, StoreError
from kvloom.observe import EntropyKind, Observer, Records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvloom.hf import Decoder
    from kvloom.trace import Trace


FORMAT = "kvloom conversation 1"


class Conversation:
    """The cache of all turns so far, and what was recorded while it was filled.

    `pending` are tokens of the last answer that are not in the cache yet. Raises ``MethodError`` when the two
    compressors ask for different things to be recorded of a row.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        compressor: Compressor | None = None,
        decode_compressor: Growing | None = None,
        capacity: int = 0,
        after: Conversation | None = None,
    ) -> None:
        self.decoder = decoder
        self.compressor = compressor
        self.decode_compressor = decode_compressor
        self.pending: list[int] = []
        self.protected: list[range] = []  # rows that no compressor of prompts may drop
        self._decoding: Decoding | None = None
        self._after = after
        if after is not None:
            self._take_over(after)
            return
        records = Records()
        for method in (compressor, decode_compressor):
            if method is not None and method.keep < 1:
                records |= method.records
        self.cache = decoder.new_cache(capacity)
        self.observer = Observer(decoder, self.cache, records)

    def _take_over(self, other: Conversation) -> None:
        """Goes on with another's cache, which that one then no longer has."""
        if other.cache.num_rows == 0:
            raise PromptError("this conversation was gone on with already; go on after its last answer")
        if other.decoder.model is not self.decoder.model:
            raise PromptError("this conversation is that of another model, which alone can go on with it")
        other.check_is_between_turns()
        self.compressor = self.compressor or other.compressor
        self.decode_compressor = self.decode_compressor or other.decode_compressor
        self._check_recorded(other.observer)
        self.cache, self.observer = other.cache, other.observer
        self.pending, self.protected = list(other.pending), list(other.protected)
        other.cache = self.decoder.new_cache(0)

    def _check_recorded(self, observer: Observer) -> None:
        for method in (self.compressor, self.decode_compressor):
            if method is not None and method.keep < 1:
                observer.require(method.records, method.name)

    def check_is_between_turns(self) -> None:
        """Raises ``PromptError`` in the middle of an answer."""
        if self._decoding is not None:
            raise PromptError(
                "the answer of this conversation is not complete; iterate over its stream to the end first"
            )

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, a turn is taken; where that fails, the conversation gone on after is what it was."""
        restore_cache, restore_observer = self.cache.checkpoint(), self.observer.checkpoint()
        try:
            yield
        except BaseException:
            if self._after is not None and restore_cache():
                restore_observer()
                self._after.cache = self.cache
            raise
        finally:
            self._after = None

    def prefill(self, token_ids: Tensor) -> Tensor:
        """(V,) float32 logits after the tokens of a turn (T,), which go on after the last answer.

        Raises ``ContextTooLong`` where the model cannot take them.
        """
        self.check_is_between_turns()
        ids = torch.cat([torch.tensor(self.pending, dtype=torch.int64), token_ids])
        total, limit = self.cache.next_position + len(ids), self.decoder.max_length
        if limit is not None and total > limit:
            raise ContextTooLong(
                f"prompt and what came before have {total:,} tokens, model takes {limit:,}: shorten it"
            )
        logits = self.observer.run(ids)
        self.pending = []
        return logits

    def compress(self) -> Compression | None:
        """Compresses all rows but the protected ones, if there is a compressor that drops any."""
        if self.compressor is None or self.compressor.keep == 1:
            return None
        return compress(self.compressor, self.cache, self.observer, protect=self.protected)

    def step(self, token: int) -> Tensor:
        """(V,) float32 logits after a token of the answer, which is appended to the cache."""
        return self._answering().step(token)

    def follow(self, token_ids: Tensor) -> Tensor:
        """(S, V) float32 logits after each token (S,) of a given answer, as one `step` for each has them."""
        return self._answering().follow(token_ids)

    def _answering(self) -> Decoding:
        if self._decoding is None:
            drops = self.decode_compressor is not None and self.decode_compressor.keep < 1
            self._decoding = Decoding(self.cache, self.observer, self.decode_compressor if drops else None)
        return self._decoding

    def end(self, token_ids: list[int], trace: Trace) -> None:
        """Hears all tokens of an answer; those that no step took are pending."""
        taken = 0
        if self._decoding is not None:
            taken = self.cache.num_rows - self._decoding.num_prompt
            trace.compressions += [done.as_dict() for done in self._decoding.done]
        self.pending = token_ids[taken:]
        self._decoding = None
        trace.kv_bytes = self.cache.num_bytes

    def protect(self, rows: Sequence[range]) -> None:
        """Rows, counted from the first of the conversation, that no compressor of prompts may drop."""
        for span in rows:
            if not 0 <= span.start <= span.stop or span.step != 1:
                raise MethodError(f"protected rows are ranges from 0 on, got {span}")
        self.protected += rows

    # --- to a file and back

    def save(self, path: str | Path) -> None:
        """Writes the cache and all that was recorded into one safetensors file, put in place when complete.

        Raises ``StoreError`` when it cannot be written, ``PromptError`` in the middle of an answer.
        """
        self.check_is_between_turns()
        tensors, plain = self._state()
        plain |= {"format": FORMAT, "fingerprint": self.decoder.fingerprint}
        told = json.dumps(plain)
        whole = safetensors.torch.save(tensors, {"kvloom": told, "content": _content_mark(tensors, told)})
        partial = Path(f"{path}.{uuid.uuid4().hex}.partial")
        try:
            partial.write_bytes(whole)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StoreError(f"cannot write {str(path)!r}: {error.strerror}") from error

    def load(self, path: str | Path) -> None:
        """Takes up what `save` wrote; answers go on bit-identically.

        Raises ``StoreError`` for a file that is not a saved conversation, or one of another model, and
        ``MethodError`` where this conversation's compressors need what was not recorded in it;
        ``PromptError`` in the middle of an answer.
        """
        self.check_is_between_turns()
        try:
            with safetensors.safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            plain = json.loads(metadata["kvloom"])
            if plain["format"] != FORMAT:
                raise ValueError(f"its format is {plain['format']!r}, not {FORMAT!r}")
            if metadata["content"] != _content_mark(tensors, metadata["kvloom"]):
                raise ValueError("it is damaged")
        except FileNotFoundError:
            raise StoreError(f"there is no saved conversation {str(path)!r}") from None
        except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            raise StoreError(f"{str(path)!r} is not a conversation that kvloom saved: {error}") from None
        if plain["fingerprint"] != self.decoder.fingerprint:
            raise StoreError(
                f"{str(path)!r} was saved by another model ({plain['fingerprint'][:12]}, this one "
                f"has {self.decoder.fingerprint[:12]}); the cache is worthless to it"
            )
        entropy = plain["records"].pop("entropy")
        kind = None if entropy is None else EntropyKind(**entropy)
        cache = self.decoder.new_cache(0)
        observer = Observer(self.decoder, cache, Records(entropy=kind, **plain["records"]))
        self._check_recorded(observer)
        self.cache, self.observer = cache, observer
        self._restore(tensors, plain)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        cache, seen = self.cache, self.observer
        tensors = {"token_ids": cache.token_ids, "positions": cache.positions, "exact": cache.exact}
        tensors |= {f"side.{name}": columns for name, columns in cache.side.items()}
        for index, layer in enumerate(cache.layers):
            tensors |= {f"keys.{index}": layer.keys[0], f"values.{index}": layer.values[0]}
            if layer.rows is not None:
                tensors[f"rows.{index}"] = layer.rows
        for kind in ("queries", "received"):
            tensors |= {f"{kind}.{index}": held for index, held in getattr(seen, kind).items()}
        for index, (total, products) in seen.sums.items():
            tensors |= {f"total.{index}": total, f"products.{index}": products}
        if seen.next_entropy is not None:
            tensors["next_entropy"] = seen.next_entropy[None]
        plain = {
            "next_position": cache.next_position,
            "spans": [[span.start, span.stop] for span in cache.spans],
            "protected": [[span.start, span.stop] for span in self.protected],
            "pending": self.pending,
            "records": asdict(seen.records),
            "num_summed": seen.num_summed,
            "num_observed": seen.num_rows,
            "is_whole": seen.is_whole,
        }
        return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, plain

    def _restore(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
        cache, seen, device = self.cache, self.observer, self.decoder.device
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        cache.token_ids, cache.positions, cache.exact = (
            tensors[name] for name in ("token_ids", "positions", "exact")
        )
        cache.side = {name[5:]: held for name, held in tensors.items() if name.startswith("side.")}
        for index, layer in enumerate(cache.layers):
            layer.fill(tensors[f"keys.{index}"], tensors[f"values.{index}"], tensors.get(f"rows.{index}"))
        for kind in ("queries", "received"):
            found = {name: held for name, held in tensors.items() if name.startswith(f"{kind}.")}
            setattr(seen, kind, {int(name.partition(".")[2]): held for name, held in found.items()})
        for name, total in tensors.items():
            if name.startswith("total."):
                seen.sums[int(name[6:])] = total, tensors[f"products.{name[6:]}"]
        seen.num_summed, seen.num_rows, seen.is_whole = (
            plain[name] for name in ("num_summed", "num_observed", "is_whole")
        )
        seen.next_entropy = tensors["next_entropy"][0] if "next_entropy" in tensors else None
        cache.next_position = plain["next_position"]
        cache.spans = [range(*span) for span in plain["spans"]]
        self.protected = [range(*span) for span in plain["protected"]]
        self.pending = plain["pending"]


def _content_mark(tensors: dict[str, Tensor], told: str) -> str:
    """xxh3-128 (hex) of all that a file holds."""
    digest = xxhash.xxh3_128(told.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
