"""Prompts for calibration: sentences hidden in a text, of which the question's answer is made.

Needle prompts hide one sentence, as the set `needle` does; multi-hop prompts hide two in different documents,
the second of which names nothing that the question names::

    "The special magic number of Lisbon is held by Mara Stone."
    "Mara Stone holds the number 4710263."
    question "What is the special magic number of Lisbon?"

Nothing is hidden in the first document: its rows are exact in a spliced cache, so no method chooses them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.errors import EvalError, MethodError
from kvloom.eval.benchmarks.needle import CITIES, FACT, QUESTION, Haystack, hide
from kvloom.eval.passages import cut, paragraphs
from kvloom.prompt import chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.loom import Loom
    from kvloom.prompt import Prompt
    from kvloom.tokenizer import Tokenizer

PIECE_TOKENS = 250
"""Longest document, so that a question reads several chunks; about as long as a passage of a RAG index."""

MIN_PIECES = 3  # the first, which is exact, and one for each of two facts

FIRST_HOP = "The special magic number of {city} is held by {name}."
SECOND_HOP = "{name} holds the number {number}."
MULTIHOP_QUESTION = "What is the special magic number of {city}?"
FIRST_NAMES = ("Mara", "Jonas", "Edith", "Tomas", "Ilse", "Rahul", "Keiko", "Omar", "Nadia", "Piet", "Lucia")
LAST_NAMES = ("Stone", "Marsh", "Fields", "Ward", "Hale", "Brook", "Lindgren", "Castro", "Okafor", "Vance")


@dataclass(frozen=True)
class Hidden:
    """A question over documents, and the sentences in them that it is about."""

    question: str
    documents: tuple[str, ...]
    facts: tuple[str, ...]  # each stands once in one of the documents, never in the first


def hidden_facts(
    text: str, tokenizer: Tokenizer, *, samples: int, length: int, seed: int
) -> list[tuple[Hidden, Hidden]]:
    """For each sample a needle and a multi-hop prompt over the same stretch of `text`, of about `length`
    tokens.

    Samples 2k and 2k + 1 hide their needle at the same depth, so that either half of them covers all depths.
    Raises ``EvalError`` for a text that is too short or is no prose.
    """
    num_tokens, num_words = len(tokenizer.encode(text.strip())), len(text.split())
    if num_tokens < length:
        raise EvalError(
            f"the text has {num_tokens:,} tokens, prompts of {length:,} are asked for; give more text or ask "
            "for a smaller length"
        )
    haystack = Haystack(paragraphs(text))
    words, piece = (max(1, tokens * num_words // num_tokens) for tokens in (length, PIECE_TOKENS))
    made = []
    for sample in range(samples):
        draw = random.Random(f"{seed}/{sample}")
        pieces = cut(haystack.stretch(draw.randrange(len(haystack.paragraphs)), words), piece)
        if len(pieces) < MIN_PIECES:
            raise EvalError(
                f"{length:,} tokens of the text make {len(pieces)} documents where {MIN_PIECES} are needed; "
                "give prose with sentences and paragraphs, or ask for a larger length"
            )
        depth = 100 * (sample // 2 + 0.5) / ((samples + 1) // 2)
        made.append((_needle(pieces, depth, draw), _multihop(pieces, draw)))
    return made


def _needle(pieces: Sequence[str], depth: float, draw: random.Random) -> Hidden:
    city, number = draw.choice(CITIES), draw.randrange(1_000_000, 10_000_000)
    fact = FACT.format(city=city, number=number)
    texts, _ = hide(fact, list(pieces[1:]), depth)
    return Hidden(QUESTION.format(city=city), (pieces[0], *texts), (fact,))


def _multihop(pieces: Sequence[str], draw: random.Random) -> Hidden:
    words = {
        "city": draw.choice(CITIES),
        "name": f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}",
        "number": draw.randrange(1_000_000, 10_000_000),
    }
    facts = (FIRST_HOP.format(**words), SECOND_HOP.format(**words))
    documents = list(pieces)
    for place, fact in zip(draw.sample(range(1, len(pieces)), len(facts)), facts, strict=True):
        (documents[place],), _ = hide(fact, [documents[place]], draw.uniform(0, 100))
    return Hidden(MULTIHOP_QUESTION.format(**words), tuple(documents), facts)


def prompt_of(loom: Loom, hidden: Hidden) -> tuple[Prompt, list[int]]:
    """The prompt, and the context rows of its facts, ascending.

    A token that reaches over a fact's edge counts as part of it. Raises ``MethodError`` where the prompt
    format cuts a fact in two.
    """
    prompt = loom.prompt(hidden.question, hidden.documents)
    parts = chunks(loom.tokenizer, loom.prompt_format, hidden.documents)
    rows: list[int] = []
    for fact in hidden.facts:
        place = next((place for place, chunk in enumerate(parts) if fact in chunk.text), None)
        if place is None:
            raise MethodError(
                f"chunk_tokens is {loom.prompt_format.chunk_tokens}, which cuts documents within a sentence; "
                "calibrate with a larger one"
            )
        text, ids = parts[place].text, parts[place].token_ids.tolist()
        start = text.index(fact)
        before = _num_equal(ids, loom.tokenizer.encode(text[:start]))
        after = _num_equal(ids[::-1], loom.tokenizer.encode(text[start + len(fact) :])[::-1])
        first = prompt.spans[place].start
        rows += range(first + before, first + len(ids) - after)
    return prompt, sorted(rows)


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many items the two begin with alike."""
    differing = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))
