"""Measure: runs in turns, what their times are in short, and what every bench says of machine and model."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import kvloom
from kvloom.attention_function import ATTENTION
from kvloom.bench.bound import Shapes
from kvloom.errors import EvalError, MethodError
from kvloom.eval.journal import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvloom.hf import Decoder
    from kvloom.loom import Loom

Found = TypeVar("Found")


def in_turns(
    runs: Mapping[str, Callable[[], Found]],
    repeats: int,
    between: Callable[[int, Mapping[str, Found]], None],
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Found]]:
    """What each run returned, `repeats` times.

    Runs take turns, every other round in reverse, so that whatever else the machine does falls on all. A
    first round, number 0, warms up and is not returned. After each round `between(round, found)` gets what
    was found in it.
    """
    taken: dict[str, list[Found]] = {name: [] for name in runs}
    done, total = 0, (repeats + 1) * len(runs)
    for number in range(repeats + 1):
        found: dict[str, Found] = {}
        for name in runs if number % 2 else reversed(list(runs)):
            found[name] = runs[name]()
            done += 1
            if on_progress is not None:
                on_progress(done, total)
        between(number, found)
        if number:
            for name, each in found.items():
                taken[name].append(each)
    return taken


def timed(decoder: Decoder, work: Callable[[], Any]) -> float:
    """Seconds of the work, the device's included."""
    decoder.synchronize()
    start = time.perf_counter()
    work()
    decoder.synchronize()
    return time.perf_counter() - start


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": median(numbers), "low": min(numbers), "high": max(numbers)}


def ratio(numbers: Sequence[float], to: Sequence[float]) -> float:
    """The median of the quotients of runs of the same round."""
    return median(number / other for number, other in zip(numbers, to, strict=True))


@contextmanager
def own_attention(decoder: Decoder) -> Iterator[Any]:
    """The model, switched back to its own attention function while inside: transformers as it is."""
    decoder.release()
    try:
        yield decoder.model
    finally:
        decoder.model.set_attn_implementation(ATTENTION)


@torch.no_grad()
def transformers_generate(decoder: Decoder, ids: torch.Tensor, num_new: int, **options: Any) -> None:
    """Exactly `num_new` greedy tokens after ids (T,) by the model's `generate`; needs `own_attention`."""
    decoder.model.generate(  # type: ignore[operator]
        ids[None],
        attention_mask=torch.ones_like(ids)[None],
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=decoder.vocab_size,  # which is no token, so nothing ends it early
        pad_token_id=0,
        **options,
    )


@contextmanager
def disk_store() -> Iterator[str]:
    """The URL of a disk store that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvloom-bench-") as folder:
        yield f"disk:{folder}"


def fitting(
    lengths: Sequence[int], limit: int | None, num_new: int
) -> tuple[list[int], list[dict[str, Any]]]:
    """The lengths that fit the model with `num_new` tokens more, and what there is to say of the others.

    Raises ``MethodError`` when none does.
    """
    fit = [length for length in lengths if limit is None or length + num_new <= limit]
    skipped = [
        {
            "length": length,
            "why": f"{length:,} tokens and {num_new} new ones do not fit, the model takes {limit:,}",
        }
        for length in lengths
        if length not in fit
    ]
    if not fit:
        raise MethodError(f"no length fits the model, which takes {limit:,} tokens; give shorter --lengths")
    return fit, skipped


def account(name: str, loom: Loom, bench: str, **recipe: Any) -> dict[str, Any]:
    """What a bench's numbers depend on: recipe, model, machine, versions."""
    decoder = loom.decoder
    device = str(decoder.device)
    if decoder.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(decoder.device)})"
    return {
        "bench": bench,
        "model": name,
        "recipe": recipe,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "kvloom_version": kvloom.__version__,
        "versions": versions(),
        "shapes": asdict(Shapes.of(decoder)),
    }


def prepare_folder(folder: Path) -> None:
    """The folder exists and can be written to, or ``EvalError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise EvalError(
            f"cannot write to the folder {str(folder)!r}: {error.strerror}; name another --out"
        ) from None


def write_json(folder: Path, found: Mapping[str, Any]) -> Path:
    """Writes DIR/BENCH.json and returns its path."""
    path = folder / f"{found['bench']}.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return path
