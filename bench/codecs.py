"""What each codec of the store costs in KL to full prefill, and gains in bytes.

Usage: python bench/codecs.py --data DIR [--limit 20] [--sets hotpotqa musique] [--codecs raw bf16 ...]
           [--model bundled:smollm2] [--ratio 0.15]

Every chunk of a sample, and the header, is packed and unpacked by each codec as a store would; the samples'
gold answers are then scored over the unpacked chunks, without recompute and with infoflow. Codecs see the
same samples and the same prefilled chunks, so differences to raw are paired.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch

from kvloom import Full, InfoFlow, Loom, NoRecompute, Selector
from kvloom.chunk_source import ChunkSource
from kvloom.errors import ContextTooLong
from kvloom.eval import benchmark, metrics
from kvloom.eval.comparison import SEED
from kvloom.eval.runner import _gold_logits
from kvloom.eval.statistics import gap_closed, paired_difference
from kvloom.store import MemoryStore
from kvloom.store.codecs import Coding, codecs
from kvloom.store.packing import Packing

if TYPE_CHECKING:
    from kvloom.eval.benchmark import Sample

SETS = ("hotpotqa", "musique")
CODECS = [f"{name}{suffix}" for name in ("raw", *sorted(set(codecs) - {"raw"})) for suffix in ("", "+zstd")]
STORE_BYTES = 8 << 30


@dataclass
class Taken:
    """What one codec took and gave, over all samples."""

    num_bytes: int = 0
    num_tokens: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    kl: dict[str, list[float]] = field(default_factory=dict)  # to full prefill, a sample each, by method
    to_raw: dict[str, list[float]] = field(default_factory=dict)  # to the same method over raw chunks


def round_trip(store: MemoryStore, packing: Packing, taken: Taken) -> MemoryStore:
    """The entries of `store`, each packed and unpacked; bytes and seconds are added to `taken`."""
    result = MemoryStore(STORE_BYTES)
    for key in store.keys():  # noqa: SIM118
        kv = store.get(key)
        assert kv is not None, "it was just stored"
        start = time.perf_counter()
        content = bytearray(b"".join(packing.pack(key, kv)))
        packed = time.perf_counter()
        unpacked = packing.unpack(key, memoryview(content))
        taken.decode_s += time.perf_counter() - packed
        taken.encode_s += packed - start
        taken.num_bytes += len(content)
        taken.num_tokens += kv.num_tokens
        result.put(key, unpacked)
    return result


def measure(
    loom: Loom, sample: Sample, methods: list[Selector], packings: dict[str, Packing], taken: dict[str, Taken]
) -> None:
    """Adds one sample's numbers to `taken`, raw first; raises ``ContextTooLong``."""
    prompt = loom.prompt(sample.question, sample.documents)
    gold = torch.tensor(loom.tokenizer.encode(sample.answers[0]))
    loom.check_length(prompt, len(gold))
    plain = MemoryStore(STORE_BYTES)
    loom.chunks = ChunkSource(loom.decoder, plain)
    loom.index(sample.documents)
    reference = _gold_logits(loom, *loom.prepare(prompt, Full(), reserve=len(gold)), gold)
    raw: dict[str, torch.Tensor] = {}
    for codec, packing in packings.items():
        loom.chunks = ChunkSource(loom.decoder, round_trip(plain, packing, taken[codec]))
        # zstd gives back what it got: the same KL, at another price.
        twin = codec.removesuffix("+zstd")
        for method in methods:
            kls, others = (
                group.setdefault(method.name, []) for group in (taken[codec].kl, taken[codec].to_raw)
            )
            if twin != codec and twin in packings:
                kls.append(taken[twin].kl[method.name][-1])
                others.append(taken[twin].to_raw[method.name][-1])
                continue
            logits = _gold_logits(loom, *loom.prepare(prompt, method, reserve=len(gold)), gold)
            raw.setdefault(method.name, logits)
            kls.append(float(metrics.kl_per_token(reference, logits).mean()))
            others.append(float(metrics.kl_per_token(raw[method.name], logits).mean()))
        assert not loom.chunks.store.rejections, loom.chunks.store.rejections


def table(taken: dict[str, Taken], methods: list[Selector]) -> list[str]:
    """Markdown, a row for each codec; KL in thousandths of a nat."""
    none, repaired = (method.name for method in methods)
    heads = [
        "codec", "bytes a token", "of raw", "encode s/1000 tokens", "decode s/1000 tokens",
        f"KL, {none}", f"KL, {repaired}", "change to raw", "KL to raw's own", "KL gap closed",
    ]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    raw = taken["raw"]
    for codec, found in taken.items():
        change = paired_difference(found.kl[repaired], raw.kl[repaired], seed=SEED)
        # From raw's own distance without recompute, so that all codecs are measured from one place.
        gap = gap_closed(raw.kl[none], found.kl[repaired], seed=SEED)
        own, count = found.to_raw[repaired], len(found.to_raw[repaired])
        per_thousand = 1000 / found.num_tokens
        cells = [
            codec,
            f"{found.num_bytes / found.num_tokens:,.0f}",
            f"{found.num_bytes / raw.num_bytes:.3f}",
            f"{found.encode_s * per_thousand:.3f}",
            f"{found.decode_s * per_thousand:.3f}",
            f"{1000 * sum(found.kl[none]) / count:.1f}",
            f"{1000 * sum(found.kl[repaired]) / count:.1f}",
            f"{1000 * change.mean:+.2f} [{1000 * change.low:.2f}, {1000 * change.high:.2f}]",
            f"{1000 * sum(own) / count:.3f}",
            f"{100 * gap.mean:.1f} % [{100 * gap.low:.1f}, {100 * gap.high:.1f}]",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="the folder of the evaluation sets")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--limit", type=int, default=20, help="samples of each set")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--ratio", type=float, default=0.15)
    options = parser.parse_args()
    names = list(dict.fromkeys(["raw", *options.codecs]))
    packings = {name: Packing(coding=Coding.parse(name)) for name in names}
    methods: list[Selector] = [NoRecompute(), InfoFlow(ratio=options.ratio)]
    loom = Loom.from_pretrained(options.model)
    print(f"{options.model}, {loom.decoder.dtype}, {loom.decoder.device}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}; infoflow {options.ratio:.0%}; KL in thousandths of a nat a token\n")
    for name in options.sets:
        taken = {codec: Taken() for codec in names}
        for sample in islice(benchmark.load(name, options.data), options.limit):
            try:
                measure(loom, sample, methods, packings, taken)
            except ContextTooLong:
                continue
        print(f"{name}, {len(taken['raw'].kl.get('infoflow', []))} samples\n")
        print("\n".join(table(taken, methods)) + "\n", flush=True)


if __name__ == "__main__":
    main()
