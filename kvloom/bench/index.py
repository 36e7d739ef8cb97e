"""Indexing: tokens a second of `Loom.index` into memory, beside transformers' forward of the same chunks one
by one.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kvloom.bench.bound import Shapes, Work, forward
from kvloom.bench.measure import account, fitting, in_turns, own_attention, ratio, spread, timed
from kvloom.bench.models import STORE
from kvloom.bench.rates import Rates
from kvloom.bench.texts import documents
from kvloom.prefill import packs
from kvloom.prompt import chunks as cut_into_chunks
from kvloom.prompt import header_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvloom.hf import Decoder
    from kvloom.loom import Loom

LENGTHS = (2048, 4096)


def run(
    name: str,
    loom: Loom,
    *,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
    chunk_tokens: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measures both ways at every length, in tokens of all chunks, as data for JSON."""
    fitting([chunk_tokens], loom.decoder.max_length, 0)
    shapes, rates = Shapes.of(loom.decoder), Rates(loom.decoder)
    found = account(name, loom, "index", repeats=repeats, chunk_tokens=chunk_tokens)
    found |= {"rates": {}, "results": []}
    for place, length in enumerate(lengths):
        rates.clear()

        def progress(done: int, total: int, place: int = place) -> None:
            if on_progress is not None:
                on_progress(place * total + done, len(lengths) * total)

        found["results"] += _measure(loom, length, repeats, chunk_tokens, shapes, rates, progress)
        found["rates"][str(length)] = rates.as_dict()
    return found


def _measure(
    loom: Loom,
    length: int,
    repeats: int,
    chunk_tokens: int,
    shapes: Shapes,
    rates: Rates,
    on_progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """A line for each way."""
    texts = documents(loom, length, chunk_tokens)
    ids = [chunk.token_ids for chunk in cut_into_chunks(loom.tokenizer, loom.prompt_format, texts)]
    num_header = len(header_ids(loom.tokenizer, loom.prompt_format))
    num_tokens = sum(map(len, ids))

    def index() -> float:
        fresh = loom.twin(store=STORE)
        return timed(loom.decoder, lambda: fresh.index(texts))

    runs = {"index": index, "transformers": lambda: one_by_one(loom.decoder, ids)}
    works = works_of(shapes, [len(chunk) for chunk in ids], num_header)
    counts = {1, *(work.rows for work in [*works["index"], *works["transformers"]])}
    loom.decoder.fingerprint  # noqa: B018 # of the model, once: not part of any indexing after the first
    taken = in_turns(runs, repeats, lambda number, _: rates.sample(counts) if number else None, on_progress)
    lines = []
    for way, seconds in taken.items():
        bound_s = math.fsum(work.seconds(rates) for work in works[way])
        lines.append(
            {
                "length": length,
                "method": way,
                "tokens": num_tokens,
                "num_chunks": len(ids),
                "header_tokens": num_header,
                "seconds": spread(seconds),
                "tokens_per_s": num_tokens / median(seconds),
                "bound_s": bound_s,
                "bound_tokens_per_s": num_tokens / bound_s,
                "quotient": median(seconds) / bound_s,
                "of_transformers": ratio(seconds, taken["transformers"]),
                "flops": sum(work.flops for work in works[way]),
                "kv_bytes": shapes.kv_bytes(num_tokens),
            }
        )
    return lines


@torch.no_grad()
def one_by_one(decoder: Decoder, chunks: Sequence[Tensor]) -> float:
    """Seconds of transformers' own forward of every chunk, its cache thrown away; no logits but the last."""
    on_device = [ids.to(decoder.device) for ids in chunks]

    def work() -> None:
        for ids in on_device:
            model(input_ids=ids[None], use_cache=True, logits_to_keep=1)

    with own_attention(decoder) as model:
        return timed(decoder, work)


def works_of(shapes: Shapes, lengths: Sequence[int], num_header: int) -> dict[str, list[Work]]:
    """What either way computes: transformers a chunk at a time and the head for its last row, kvloom the
    header once and then chunks packed into one forward, each behind the header, without the head.
    """
    transformers = [forward(shapes, range(length)) for length in lengths]
    ours = [forward(shapes, range(num_header), head_rows=0)]
    for pack in packs(lengths):
        parts = [
            forward(shapes, range(num_header, num_header + lengths[place]), head_rows=0) for place in pack
        ]
        ours.append(
            Work(
                rows=sum(part.rows for part in parts),
                linear_flops=sum(part.linear_flops for part in parts),
                attention_flops=sum(part.attention_flops for part in parts),
                kv_read_bytes=sum(part.kv_read_bytes for part in parts),
            )
        )
    return {"index": [work for work in ours if work.flops], "transformers": transformers}
