"""Memory: the most that a process holds while it answers, against the model and one copy of the KV.

Each way answers in a process of its own, over chunks in a disk store that another process has filled, so that
neither indexing nor another way counts. On a CPU it is the resident set, libraries included, whose high-water
mark Linux resets just before the answer (elsewhere the mark is that of the whole process, and the line says
so); on CUDA what torch allocated on the device.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvloom
from kvloom import errors
from kvloom.bench.bound import Shapes
from kvloom.bench.measure import account, disk_store, fitting, own_attention, transformers_generate
from kvloom.bench.models import open_model
from kvloom.bench.texts import QUESTION, prompt_of
from kvloom.bench.ttft import TRANSFORMERS, ways
from kvloom.errors import ModelError
from kvloom.eval.speed import peak_memory
from kvloom.generate import Sampling, generate
from kvloom.selectors import Full, selectors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvloom.loom import Loom
    from kvloom.prompt import Prompt

LENGTHS = (2048,)
METHODS = (TRANSFORMERS, "full", "none", "infoflow")
NEW_TOKENS = 4


def run(
    name: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    methods: Sequence[str] = METHODS,
    ratio: float = 0.15,
    chunk_tokens: int = 512,
    dtype: str | None = None,
    device: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The peak of an answer of a few tokens by every method at every length, as data for JSON.

    The model is loaded in the processes started here only. Raises what they raise.
    """
    names = list(dict.fromkeys(methods))
    every = [way for way in ways(names, [ratio]) if not way.from_disk]
    recipe = {"methods": names, "ratio": ratio, "chunk_tokens": chunk_tokens, "new_tokens": NEW_TOKENS}
    with disk_store() as url:
        asked = {"model": name, "dtype": dtype, "device": device, "store": url, "chunk_tokens": chunk_tokens}
        found = _ask({**asked, "lengths": list(lengths), "recipe": recipe})
        fit = found.pop("fit")
        found["results"], total = [], 1 + len(fit) * len(every)
        for length in fit:
            for way in every:
                if on_progress is not None:
                    on_progress(len(found["results"]) + 1, total)
                line = {"length": length, "method": way.name, "ratio": way.ratio}
                found["results"].append(line | _ask({**asked, **line}))
    return found


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own answers; raises what it raised."""
    source = str(Path(kvloom.__file__).parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "kvloom.bench.memory"],
        input=json.dumps(request),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"the process that answers ended with code {done.returncode}: {why}") from None
    if "error" in answer:
        raise getattr(errors, answer["kind"])(answer["error"])
    return answer


def _work(request: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: fills the store for all lengths, or answers once."""
    loom = open_model(
        request["model"],
        chunk_tokens=max(1024, 2 * request["chunk_tokens"]),
        store=request["store"],
        dtype=request["dtype"],
        device=request["device"],
    )
    if "lengths" in request:
        return _fill(request, loom)
    prompt = prompt_of(loom, request["length"], request["chunk_tokens"])
    return measure(loom, prompt, request["method"], request["ratio"])


def _fill(request: dict[str, Any], loom: Loom) -> dict[str, Any]:
    fit, skipped = fitting(request["lengths"], loom.decoder.max_length, NEW_TOKENS)
    for length in fit:
        loom.splice(prompt_of(loom, length, request["chunk_tokens"]))
    return account(request["model"], loom, "memory", **request["recipe"]) | {"fit": fit, "skipped": skipped}


def measure(loom: Loom, prompt: Prompt, method: str, ratio: float | None) -> dict[str, Any]:
    """One answer's bytes.

    before_bytes  held before: libraries and model; on CUDA the model
    peak_bytes    most held during the answer
    model_bytes, kv_bytes  of all weights, and of one copy of the KV of prompt and answer
    grown_bytes   peak less before
    kv_copies     grown, in copies of the KV
    quotient      peak over model and one copy
    is_exact      False where the mark is that of the whole process
    """
    decoder = loom.decoder
    loom.answer(QUESTION, ["Warm up."], selector=Full(), max_new_tokens=2)

    def work() -> None:
        if method == TRANSFORMERS:
            with own_attention(decoder):
                transformers_generate(decoder, prompt.token_ids.to(decoder.device), NEW_TOKENS)
            return
        selector = selectors.build(method, {} if ratio is None else {"ratio": ratio})
        cache, logits = loom.prepare(prompt, selector, reserve=NEW_TOKENS)
        list(generate(decoder, cache, logits, Sampling(max_new_tokens=NEW_TOKENS), frozenset()))

    before, peak, is_exact = _peak(work, decoder.device)
    model = sum(tensor.nbytes for tensor in decoder.model.parameters())  # tied ones once
    kv = Shapes.of(decoder).kv_bytes(prompt.num_tokens + NEW_TOKENS)
    return {
        "before_bytes": before,
        "peak_bytes": peak,
        "model_bytes": model,
        "kv_bytes": kv,
        "grown_bytes": peak - before,
        "kv_copies": (peak - before) / kv,
        "quotient": peak / (model + kv),
        "is_exact": is_exact,
    }


def _peak(work: Callable[[], None], device: torch.device) -> tuple[int, int, bool]:
    """Bytes held before, most held while it works, and whether the latter is of this work alone."""
    if device.type == "cuda":
        import torch

        before = torch.cuda.memory_allocated(device)
        return before, before + peak_memory(work, device), True
    marks = Path("/proc/self/clear_refs")
    try:
        marks.write_text("5", encoding="ascii")  # resets the high-water mark
        before = _status("VmRSS")
        work()
        return before, _status("VmHWM"), True
    except OSError:
        before = _high_water()
        work()
        return before, _high_water(), False


def _status(name: str) -> int:
    """Bytes that Linux reports of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _high_water() -> int:
    """Bytes; macOS counts in bytes, others in KiB."""
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return mark if sys.platform == "darwin" else 1024 * mark


def main() -> None:
    """Reads a request from standard input, prints the answer or the error as the last line."""
    try:
        answer = _work(json.load(sys.stdin))
    except errors.KVLoomError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
