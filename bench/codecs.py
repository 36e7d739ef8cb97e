"""What each codec of the store costs in KL to full prefill, and gains in bytes.

Usage: python bench/codecs.py --data DIR --out DIR [--limit 20] [--sets hotpotqa musique]
           [--codecs raw int8 ...] [--model bundled:smollm2] [--ratio 0.15] [--device DEV] [--dtype DTYPE]

Every chunk of a sample, and the header, is packed and unpacked by each codec as a store would; the samples'
gold answers are then scored over the unpacked chunks, without recompute and with infoflow. Codecs see the
same samples and the same prefilled chunks, so differences to raw are paired.

Each sample and codec is a line of OUT/results.jsonl as soon as it is measured. The same command again goes on
where it stopped, and measures only the codecs and samples that are not there; the tables are over all lines.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvloom import Full, InfoFlow, Loom, NoRecompute, Selector
from kvloom.errors import ContextTooLong
from kvloom.eval import benchmark, metrics
from kvloom.eval.comparison import SEED
from kvloom.eval.journal import Journal, read_lines
from kvloom.eval.runner import gold_logits
from kvloom.eval.statistics import gap_closed, paired_difference
from kvloom.store import MemoryStore
from kvloom.store.codecs import Coding, codecs
from kvloom.store.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvloom.eval.benchmark import Sample

SETS = ("hotpotqa", "musique")
CODECS = [f"{name}{suffix}" for name in ("raw", *sorted(set(codecs) - {"raw"})) for suffix in ("", "+zstd")]
STORE_BYTES = 8 << 30


@dataclass(frozen=True)
class Recipe:
    """What the numbers depend on, beside set, sample and codec."""

    model: str
    ratio: float
    dtype: str


def round_trip(store: MemoryStore, packing: Packing) -> tuple[MemoryStore, dict[str, float]]:
    """The entries of `store`, each packed and unpacked, and the bytes and seconds that took."""
    result = MemoryStore(STORE_BYTES)
    costs = dict.fromkeys(("num_bytes", "num_tokens", "encode_s", "decode_s"), 0.0)
    for key in store.keys():  # noqa: SIM118
        kv = store.get(key)
        assert kv is not None, "it was just stored"
        start = time.perf_counter()
        content = bytearray(b"".join(packing.pack(key, kv)))
        packed = time.perf_counter()
        unpacked = packing.unpack(key, memoryview(content))
        costs["decode_s"] += time.perf_counter() - packed
        costs["encode_s"] += packed - start
        costs["num_bytes"] += len(content)
        costs["num_tokens"] += kv.num_tokens
        result.put(key, unpacked)
    return result, costs


def measure(
    loom: Loom, sample: Sample, methods: Sequence[Selector], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One codec after the other: its costs, and for each method the KL to full prefill (``kl``) and to the
    same method over raw chunks (``to_raw``). Raises ``ContextTooLong``.
    """
    prompt = loom.prompt(sample.question, sample.documents)
    gold = torch.tensor(loom.tokenizer.encode(sample.answers[0]))
    loom.check_length(prompt, len(gold))
    plain = MemoryStore(STORE_BYTES)
    loom.twin(store=plain).index(sample.documents)

    def scored(store: MemoryStore, method: Selector) -> Tensor:
        logits = gold_logits(loom, *loom.twin(store=store).prepare(prompt, method, reserve=len(gold)), gold)
        assert not store.rejections, store.rejections
        return logits

    reference = scored(plain, Full())
    raw = {method.name: scored(plain, method) for method in methods}
    done: dict[str, dict[str, dict[str, float]]] = {}
    for codec in names:
        store, costs = round_trip(plain, Packing(coding=Coding.parse(codec)))
        # zstd gives back what it got: the same KL, at another price.
        twin = codec.removesuffix("+zstd")
        if twin not in done:
            done[twin] = {"kl": {}, "to_raw": {}}
            for method in methods:
                logits = raw[method.name] if twin == "raw" else scored(store, method)
                for kind, base in (("kl", reference), ("to_raw", raw[method.name])):
                    done[twin][kind][method.name] = float(metrics.kl_per_token(base, logits).mean())
        yield {"codec": codec, **costs, **done[twin]}


def table(lines: Sequence[dict[str, Any]], methods: Sequence[Selector]) -> list[str]:
    """Markdown, a row for each codec; KL in thousandths of a nat. Only samples that all codecs have count."""
    none, repaired = (method.name for method in methods)
    heads = [
        "codec", "bytes a token", "of raw", "encode s/1000 tokens", "decode s/1000 tokens",
        f"KL, {none}", f"KL, {repaired}", "change to raw", "KL to raw's own", "KL gap closed",
    ]  # fmt: skip
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    of_codec: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        of_codec[line["codec"]][line["sample"]] = line
    shared = sorted(set.intersection(*map(set, of_codec.values())))
    if not shared:
        return ["no sample has been measured with all codecs"]

    def values(codec: str, kind: str, method: str) -> list[float]:
        return [of_codec[codec][sample][kind][method] for sample in shared]

    def total(codec: str, name: str) -> float:
        return sum(of_codec[codec][sample][name] for sample in shared)

    for codec in of_codec:
        change = paired_difference(values(codec, "kl", repaired), values("raw", "kl", repaired), seed=SEED)
        # From raw's own distance without recompute, so that all codecs are measured from one place.
        gap = gap_closed(values("raw", "kl", none), values(codec, "kl", repaired), seed=SEED)
        means = [
            1000 * sum(values(codec, kind, method)) / len(shared)
            for kind, method in (("kl", none), ("kl", repaired), ("to_raw", repaired))
        ]
        num_tokens = total(codec, "num_tokens")
        cells = [
            codec,
            f"{total(codec, 'num_bytes') / num_tokens:,.0f}",
            f"{total(codec, 'num_bytes') / total('raw', 'num_bytes'):.3f}",
            f"{total(codec, 'encode_s') * 1000 / num_tokens:.3f}",
            f"{total(codec, 'decode_s') * 1000 / num_tokens:.3f}",
            f"{means[0]:.1f}",
            f"{means[1]:.1f}",
            f"{1000 * change.mean:+.2f} [{1000 * change.low:.2f}, {1000 * change.high:.2f}]",
            f"{means[2]:.3f}",
            f"{100 * gap.mean:.1f} % [{100 * gap.low:.1f}, {100 * gap.high:.1f}]",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return [*rows, "", f"{len(shared)} samples"]


def run(
    loom: Loom,
    journal: Journal,
    name: str,
    samples: Sequence[Sample],
    methods: Sequence[Selector],
    names: Sequence[str],
) -> None:
    """Every sample and codec that the journal lacks is in it."""
    for number, sample in enumerate(samples, 1):
        missing = [codec for codec in names if (name, sample.id, codec) not in journal.done]
        start = time.perf_counter()
        try:
            for line in measure(loom, sample, methods, missing) if missing else ():
                journal.write({"set": name, "sample": sample.id, **line})
        except ContextTooLong as error:
            print(f"{name} {number}/{len(samples)}: left out: {error}", file=sys.stderr, flush=True)
            continue
        took = f"{len(missing)} codecs in {time.perf_counter() - start:.0f} s" if missing else "done before"
        print(f"{name} {number}/{len(samples)}: {took}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="the folder of the evaluation sets")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results; resumable")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--limit", type=int, default=20, help="samples of each set")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    options = parser.parse_args()
    names = list(dict.fromkeys(["raw", *options.codecs]))
    for codec in names:
        Coding.parse(codec)
    samples = {name: benchmark.load(name, options.data, options.limit) for name in options.sets}
    methods: list[Selector] = [NoRecompute(), InfoFlow(ratio=options.ratio)]
    loom = Loom.from_pretrained(options.model, device=options.device, dtype=options.dtype)
    recipe = Recipe(options.model, options.ratio, str(loom.decoder.dtype))
    journal = Journal(options.out, recipe, ("set", "sample", "codec"))
    print(f"{options.model}, {loom.decoder.dtype}, {loom.decoder.device}, {torch.get_num_threads()} threads")
    print(f"torch {torch.__version__}; infoflow {options.ratio:.0%}; KL in thousandths of a nat a token")
    for name in options.sets:
        run(loom, journal, name, samples[name], methods, names)
        wanted = {sample.id for sample in samples[name]}
        lines = [
            line
            for line in read_lines(journal.results)
            if line["set"] == name and line["sample"] in wanted and line["codec"] in names
        ]
        print(f"\n{name}\n\n" + "\n".join(table(lines, methods) if lines else ["no samples"]), flush=True)


if __name__ == "__main__":
    main()
