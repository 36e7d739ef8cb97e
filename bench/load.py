"""What reading the next chunk while the last is spliced saves, by codec of a disk store.

Usage: python bench/load.py [--model bundled:smollm2] [--tokens 2048] [--rounds 7] [--codecs raw bf16 ...]

The context of one prompt is spliced from files that the page cache holds, with reading ahead and, in turn,
without; the medians are printed as a Markdown table. Waited is what the splicing waited for chunks, read is
what the reading took by itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING

from kvloom import Loom, Trace
from kvloom.bench.texts import prompt_of
from kvloom.prompt import PromptFormat

if TYPE_CHECKING:
    from kvloom.prompt import Prompt

CODECS = ("raw", "bf16", "bf16+zstd", "int8")


def splice(loom: Loom, prompt: Prompt, *, is_ahead: bool) -> tuple[float, float, float]:
    """Milliseconds of all, of waiting, and of reading."""
    loom.chunks.reads_ahead = is_ahead
    trace, start = Trace(), time.perf_counter()
    loom.splice(prompt, trace=trace)
    seconds = time.perf_counter() - start
    assert all(found["hit"] for found in trace.lookups), "the store was filled before"
    read = sum(found["seconds"] for found in trace.lookups)
    return 1000 * seconds, 1000 * trace.seconds.load, 1000 * read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="bundled:smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    given = parser.parse_args()
    whole = Loom.from_pretrained(given.model, prompt_format=PromptFormat(chunk_tokens=1024))
    prompt = prompt_of(whole, given.tokens, 512)
    print(f"{given.model}, {given.tokens:,} tokens in {len(prompt.chunk_ids)} chunks; milliseconds\n")
    print("| codec | in turn | of it reading | ahead | of it waited | saved |")
    print("| --- | --- | --- | --- | --- | --- |")
    for codec in given.codecs:
        with tempfile.TemporaryDirectory() as folder:
            loom = whole.twin(store=f"disk:{folder}?codec={codec.replace('+', '%2B')}")
            loom.splice(prompt)  # fills the store
            taken: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
            for _ in range(given.rounds):
                for is_ahead in taken:
                    taken[is_ahead].append(splice(loom, prompt, is_ahead=is_ahead))
        ahead, behind = (
            [median(column) for column in zip(*taken[way], strict=True)] for way in (True, False)
        )
        print(
            f"| {codec} | {behind[0]:.1f} | {behind[2]:.1f} | {ahead[0]:.1f} | {ahead[1]:.1f} | "
            f"{1 - ahead[0] / behind[0]:.0%} |"
        )


if __name__ == "__main__":
    main()
