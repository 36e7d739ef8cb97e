"""A long answer: prompt -> cache -> smaller cache -> answer, compressed as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from kvloom.compressors import Compressor, as_compressor
from kvloom.conversation import Conversation
from kvloom.errors import ContextTooLong, PromptError
from kvloom.generate import AnswerStream, Sampling, SamplingOptions
from kvloom.trace import Answer, Trace
from kvloom.turns import turn_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvloom.loom import Loom


def generate(
    loom: Loom,
    prompt: str | Tensor,
    *,
    compressor: Compressor | str | None = None,
    options: Mapping[str, Any] | None = None,
    decode_compressor: Compressor | str | None = None,
    decode_options: Mapping[str, Any] | None = None,
    after: Answer | Conversation | None = None,
    protect: Sequence[range] = (),
    **sampling: Unpack[SamplingOptions],
) -> AnswerStream:
    """The answer to a prompt as an iterator of text pieces; the prompt is computed and compressed before this
    returns.

    A string becomes a user's turn by the tokenizer's chat template, token ids (T,) int64 are taken as they
    are. `compressor` drops rows of the prompt, `decode_compressor` of the answer while it grows; each is an
    instance, or a name with its options as data. `after` is an answer of this Loom, or a conversation loaded
    from a file, that this prompt goes on after, at true positions; its compressors are kept unless others are
    given. `protect` are ranges of rows, counted from the first token of the conversation, that stay.

    What each compression did is in the trace's `compressions`. Raises ``MethodError``, ``PromptError``,
    ``ContextTooLong``; then the conversation gone on after is what it was, and can be gone on with.
    """
    chosen = _method(compressor, options, "prefill")
    growing = _method(decode_compressor, decode_options, "decode")
    wanted, trace = Sampling.of(sampling), Trace()
    held = after.continuation if isinstance(after, Answer) else after
    if after is not None and held is None:
        raise PromptError("this answer cannot be gone on after: it was not made by Loom.generate")
    ids = prompt
    if isinstance(prompt, str):
        ids = turn_ids(loom.tokenizer, loom.prompt_format, prompt, is_first=held is None)
    ids = _checked(ids)
    earlier = 0 if held is None else held.cache.next_position + len(held.pending)
    limit, total = loom.decoder.max_length, earlier + len(ids) + wanted.max_new_tokens
    if limit is not None and total > limit:
        raise ContextTooLong(
            f"prompt and answer may have {total:,} tokens, the model takes "
            f"{limit:,}: shorten the prompt or ask for fewer new tokens"
        )
    talk = Conversation(
        loom.decoder,
        compressor=chosen,
        decode_compressor=growing,
        capacity=len(ids) + wanted.max_new_tokens,
        after=held,
    )
    trace.method, trace.question_tokens = repr(talk.compressor), len(ids)
    trace.token_layers = (len(talk.pending) + len(ids)) * loom.decoder.num_layers
    with talk.all_or_nothing():
        talk.protect(protect)
        with trace.seconds.clock("recompute", loom.decoder.synchronize):
            logits = talk.prefill(ids)
        with trace.seconds.clock("compress", loom.decoder.synchronize):
            done = talk.compress()
    if done is not None:
        trace.compressions.append(done.as_dict())
    return AnswerStream(loom.decoder, loom.tokenizer, talk.cache, logits, wanted, trace, talk)


def _method(method: Compressor | str | None, options: Mapping[str, Any] | None, phase: str) -> Any:
    if method is None:
        if options:
            raise TypeError(f"options {dict(options)} go with the name of a compressor, none is given")
        return None
    return as_compressor(method, options, phase=phase)


def _checked(ids: Any) -> Tensor:
    if not isinstance(ids, Tensor) or ids.ndim != 1 or ids.dtype != torch.int64 or len(ids) == 0:
        raise PromptError("a prompt is a string or token ids (T,) int64, at least one")
    return ids.cpu()
