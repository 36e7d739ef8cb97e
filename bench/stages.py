"""Seconds per stage of an answer, beside full prefill, by context length.

Usage: python bench/stages.py [--model bundled:smollm2] [--tokens 1000 2000 4000] [--rounds 3] [--ratio 0.15]

Chunks are passages of the demo corpus, renumbered so that each is its own chunk, in a RAM store. Methods take
turns; the medians of the rounds are printed as a Markdown table, one row per length and method.
"""

from __future__ import annotations

import argparse
import platform
import statistics

import torch

from kvloom import Document, Full, InfoFlow, Loom, NoRecompute, Selector, Trace
from kvloom.demo import corpus

STAGES = ("load", "splice", "score", "recompute", "first_token", "ttft")


def documents_of(loom: Loom, question: str, num_tokens: int) -> list[Document]:
    """Passages whose prompt has about `num_tokens` tokens, none twice."""
    passages, _ = corpus()
    documents: list[Document] = []
    while True:
        source = passages[len(documents) % len(passages)]
        document = Document(source.text, title=f"{source.title} ({len(documents) + 1})")
        if loom.prompt(question, [*documents, document]).num_tokens > num_tokens and documents:
            return documents
        documents.append(document)


def measure(loom: Loom, num_tokens: int, methods: list[Selector], rounds: int) -> None:
    question = "Who wrote about it, and where?"
    documents = documents_of(loom, question, num_tokens)
    prompt = loom.prompt(question, documents)
    loom.index(documents)
    taken: dict[Selector, list[Trace]] = {method: [] for method in methods}
    for number in range(rounds + 1):
        for method in methods:
            trace = Trace()
            loom.prepare(prompt, method, trace=trace)
            if number:  # the first round warms up
                taken[method].append(trace)
    full = statistics.median(trace.seconds.ttft for trace in taken[methods[0]])
    for method, traces in taken.items():
        seconds = {
            stage: statistics.median(t.as_dict()["seconds"][stage] for t in traces) for stage in STAGES
        }
        cells = " | ".join(f"{seconds[stage]:.3f}" for stage in STAGES)
        rows = traces[0].recomputed_rows
        print(
            f"| {prompt.num_tokens:,} | {method.name} | {rows:,} | {cells} | {seconds['ttft'] / full:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.15)
    options = parser.parse_args()
    loom = Loom.from_pretrained(options.model, store="memory:8GiB")
    threads, device = torch.get_num_threads(), loom.decoder.device
    print(f"{options.model}, {loom.decoder.dtype}, {device}, {threads} threads, {platform.processor()}")
    print(f"torch {torch.__version__}, medians of {options.rounds} rounds, seconds\n")
    print("| prompt tokens | method | rows | " + " | ".join(STAGES) + " | of full |")
    print("|" + " --- |" * (len(STAGES) + 4))
    for num_tokens in options.tokens:
        measure(loom, num_tokens, [Full(), NoRecompute(), InfoFlow(ratio=options.ratio)], options.rounds)


if __name__ == "__main__":
    main()
