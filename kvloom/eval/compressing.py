"""Compressors as the command line writes them, and one prompt compressed by several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvloom.compressors import Compressor, as_compressor
from kvloom.errors import ContextTooLong, MethodError
from kvloom.eval.runner import split_method
from kvloom.eval.speed import WARM_UP, measure_speed
from kvloom.long_answer import generate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.loom import Loom
    from kvloom.trace import Trace


@dataclass(frozen=True)
class Rival:
    """A compressor; `label` is how it was written."""

    label: str
    compressor: Compressor


def parse_rival(text: str, shared: Mapping[str, str] | None = None, *, phase: str = "prefill") -> Rival:
    """From ``NAME`` or ``NAME:OPTION=VALUE,...``, with options that are `shared` by all.

    Raises ``MethodError`` for an unknown name or option, and one that stands in both places.
    """
    name, options = split_method(text)
    twice = options.keys() & (shared or {}).keys()
    if twice:
        raise MethodError(f"{text!r}: {', '.join(sorted(twice))} is given with the method and for all; once")
    return Rival(text, as_compressor(name, {**options, **(shared or {})}, phase=phase))


def check_different(rivals: Iterable[Rival]) -> None:
    """Raises ``MethodError`` where two are the same method with the same options."""
    seen: dict[Compressor, str] = {}
    for rival in rivals:
        if rival.compressor in seen:
            raise MethodError(f"{seen[rival.compressor]!r} and {rival.label!r} are the same method; name one")
        seen[rival.compressor] = rival.label


def compress_prompt(
    loom: Loom,
    ids: Tensor,
    rivals: Sequence[Rival],
    *,
    max_new_tokens: int = 0,
    decode: Compressor | None = None,
    save: Path | None = None,
    steps: int = 0,
) -> list[dict[str, Any]]:
    """What each method makes of the prompt's ids (T,), each from a prefill of its own, as data for JSON.

    With `max_new_tokens` each also answers, greedily; with `steps` cost and decode steps are timed, for which
    see `kvloom.eval.speed`. `save` writes the conversation of the last method to a
    file. Raises ``ContextTooLong``, ``MethodError``, ``StoreError``.
    """
    limit, found = loom.decoder.max_length, []
    if steps and limit is not None and len(ids) + steps + WARM_UP > limit:
        raise ContextTooLong(
            f"the prompt has {len(ids):,} tokens and {steps + WARM_UP:,} steps follow, the model takes "
            f"{limit:,}: shorten the prompt or ask for fewer --steps"
        )
    for rival in rivals:
        # One token at least is asked for, but none is computed unless the stream is read.
        stream = generate(
            loom,
            ids,
            compressor=rival.compressor,
            decode_compressor=decode,
            max_new_tokens=max(1, max_new_tokens),
        )
        row = _row(rival, ids, stream.trace, stream.cache.num_bytes, loom.decoder.num_layers)
        if max_new_tokens:
            answer = stream.finish()
            row["answer"] = answer.text
            row["new_tokens"] = answer.trace.new_tokens
            row["decode_s"] = answer.trace.seconds.decode
            row["decode_compressions"] = answer.trace.compressions[len(row["compressions"]) :]
            row["bytes_at_end"] = answer.trace.kv_bytes
        del row["compressions"]
        if steps:
            row["speed"] = measure_speed(loom, ids, rival.compressor, steps)
        if save is not None:
            stream.continuation.save(save)  # type: ignore[union-attr] # a Conversation
            row["saved"] = str(save)
        found.append(row)
    return found


def _row(rival: Rival, ids: Tensor, trace: Trace, num_bytes: int, num_layers: int) -> dict[str, Any]:
    whole = [len(ids)] * num_layers
    done = trace.compressions[0] if trace.compressions else None
    return {
        "method": rival.label,
        "recipe": repr(rival.compressor),
        "tokens": len(ids),
        "kept": whole if done is None else done["kept"],
        "bytes_before": num_bytes if done is None else done["bytes_before"],
        "bytes_after": num_bytes if done is None else done["bytes_after"],
        "prefill_s": trace.seconds.recompute,
        "compress_s": trace.seconds.compress,
        "note": "keep=1: nothing is dropped" if done is None else done["note"],
        "compressions": list(trace.compressions),
    }
