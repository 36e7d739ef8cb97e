"""Texts to bench with: prompts of an exact number of tokens, made of the demo's corpus, which is shipped.

Each chunk begins with its number, so that none is stored twice.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING

from kvloom.demo import corpus
from kvloom.errors import MethodError
from kvloom.prompt import Document

if TYPE_CHECKING:
    from kvloom.loom import Loom
    from kvloom.prompt import Prompt

QUESTION = "Who wrote about it, and where?"


def documents(loom: Loom, num_tokens: int, chunk_tokens: int) -> list[Document]:
    """Documents of about `chunk_tokens` tokens each, a chunk each, that have `num_tokens` in all or a few
    more.
    """
    words = " ".join(passage.text for passage in corpus()[0]).split()
    tokens_per_word = len(loom.tokenizer.encode(" ".join(words))) / len(words)
    stream, found, total = cycle(words), [], 0
    num_words = max(1, int(0.9 * min(chunk_tokens, num_tokens) / tokens_per_word))
    while total < num_tokens:
        text = f"Passage {len(found) + 1}. " + " ".join(islice(stream, num_words))
        found.append(Document(text))
        total += len(loom.tokenizer.encode(text))
    return found


def prompt_of(loom: Loom, num_tokens: int, chunk_tokens: int) -> Prompt:
    """A prompt of exactly `num_tokens` tokens; raises ``MethodError`` for fewer than it needs."""
    prompt = loom.prompt(QUESTION, documents(loom, num_tokens, chunk_tokens))
    room = num_tokens - len(prompt.header_ids) - len(prompt.question_ids)
    if room < 2:
        least = num_tokens - room + 2
        raise MethodError(
            f"a prompt has at least {least} tokens here, got length {num_tokens}; give a longer one"
        )
    kept = []
    for ids in prompt.chunk_ids:
        kept.append(ids[: room - sum(map(len, kept))])
        if sum(map(len, kept)) == room:
            break
    return replace(prompt, chunk_ids=kept, chunk_documents=tuple(range(len(kept))))
