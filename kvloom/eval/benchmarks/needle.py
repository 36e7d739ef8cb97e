"""Needle in a haystack: a sentence hidden in a long text at a given depth, after Kamradt (2023) and as in
Fig. 3 of the InfoFlow KV paper.

A sample::

    question   "What is the special magic Lisbon number?"
    answers    ("4710263",)
    documents  the haystack in pieces of one size, one of which holds
               "The special magic Lisbon number is 4710263."
    supporting (3,)
    kind       "length=2000,depth=50"

Unlike the authors', every draw comes from the seed and the sample's own length, depth and round, so that a
sample is the same whichever others are asked for. Within a round all haystacks begin at the same place, so
that cells of the heatmap differ in length and depth and in nothing else, and pieces without the needle are
the same at each depth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from kvloom.errors import EvalError, MethodError
from kvloom.eval.benchmark import Benchmark, Sample, benchmarks
from kvloom.eval.passages import SENTENCE_END, cut, paragraphs, sentences
from kvloom.prompt import Document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Unit = Literal["tokens", "words"]
FACT = "The special magic {city} number is {number}."
QUESTION = "What is the special magic {city} number?"
WORDS_PER_TOKEN = 0.75  # of SmolLM2's tokenizer: 0.72 on Emerson's essays, 0.76 on Sherlock Holmes
CITIES = (
    *(
        "Amsterdam",
        "Athens",
        "Bangkok",
        "Berlin",
        "Bogota",
        "Brisbane",
        "Budapest",
        "Cairo",
        "Chicago",
        "Dakar",
    ),
    *("Dublin", "Geneva", "Hanoi", "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon"),
    *(
        "Madrid",
        "Manila",
        "Melbourne",
        "Montreal",
        "Mumbai",
        "Nairobi",
        "Oslo",
        "Prague",
        "Santiago",
        "Seoul",
    ),
    *("Toronto", "Vienna", "Warsaw", "Zurich"),
)


@benchmarks.register("needle")
@dataclass(frozen=True, kw_only=True)
class Needle(Benchmark):
    """One sample for each round, length and depth, in this order.

    Raises ``MethodError`` for a value out of range.
    """

    lengths: tuple[int, ...] = (1000, 2000, 4000)  # of the haystack, in `unit`
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)  # per cent of the haystack before the needle
    rounds: int = 1  # samples for each length and depth
    chunk: int = 500  # longest document, in `unit`
    unit: Unit = "tokens"  # approximate ones, 0.75 words each
    seed: int = 0
    text: str | None = field(
        default=None, repr=False
    )  # in place of the files in haystack/ of the data folder

    version = "1"
    is_multihop = False
    metric = "contains"
    description = "a number hidden in a long text, over lengths and depths"
    licence = "that of the texts in haystack/"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise MethodError(f"needle: unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        if not self.lengths or min(self.lengths) < 100:
            raise MethodError(f"needle: lengths are {self.unit} and at least 100, got {list(self.lengths)}")
        if not self.depths or min(self.depths) < 0 or max(self.depths) > 100:
            raise MethodError(f"needle: depths are per cent, from 0 to 100, got {list(self.depths)}")
        if self.rounds < 1:
            raise MethodError(f"needle: rounds must be at least 1, got {self.rounds}")
        if self.chunk < 50:
            raise MethodError(f"needle: chunk is a number of {self.unit} and at least 50, got {self.chunk}")
        for name in ("lengths", "depths"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise MethodError(f"needle: {name} holds a value twice: {list(getattr(self, name))}")

    def samples(self, data: Path | None) -> Iterator[Sample]:
        haystack = Haystack(paragraphs(self._text(data)))
        for round in range(self.rounds):
            first = random.Random(f"{self.seed}/{round}").randrange(len(haystack.paragraphs) or 1)
            for length in self.lengths:
                stack = haystack.stretch(first, self._words(length))
                pieces = cut(stack, self._words(self.chunk))
                for depth in self.depths:
                    yield self._sample(pieces, round, length, depth)

    def _sample(self, pieces: list[str], round: int, length: int, depth: int) -> Sample:
        draw = random.Random(f"{self.seed}/{round}/{length}/{depth}")
        city, number = draw.choice(CITIES), str(draw.randrange(1_000_000, 10_000_000))
        texts, place = hide(FACT.format(city=city, number=number), pieces, depth)
        id = f"needle_{length}_{depth}_{round}"
        return Sample(
            id=id,
            question=QUESTION.format(city=city),
            answers=(number,),
            documents=tuple(Document(text, id=f"{id}/{part}") for part, text in enumerate(texts)),
            supporting=(place,),
            kind=f"length={length},depth={depth}",
        )

    def _words(self, length: int) -> int:
        return length if self.unit == "words" else int(length * WORDS_PER_TOKEN)

    def _text(self, data: Path | None) -> str:
        if self.text is not None:
            return self.text
        if data is None:
            raise EvalError(
                "needle: name a data folder with --data or KVLOOM_DATA, with long plain texts in it as "
                "haystack/*.txt, such as public-domain books"
            )
        files = sorted((data / "haystack").glob("*.txt"))
        if not files:
            raise EvalError(
                f"needle: there is no text in {data / 'haystack'}; put long plain texts there as *.txt, "
                "such as public-domain books"
            )
        try:
            return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
        except UnicodeDecodeError as error:
            raise EvalError(f"needle: a text in {data / 'haystack'} is not UTF-8: {error}") from error


@dataclass(frozen=True)
class Haystack:
    """A long text that goes on at its beginning when its end is reached."""

    paragraphs: list[str]

    @cached_property
    def num_words(self) -> int:
        return sum(len(paragraph.split()) for paragraph in self.paragraphs)

    def stretch(self, first: int, words: int) -> list[str]:
        """The paragraphs from number `first` on, to the last whole sentence within `words` words.

        Raises ``EvalError`` when the text would have to repeat itself.
        """
        if self.num_words < words:
            raise EvalError(
                f"needle: the haystack holds {self.num_words} words, {words} are asked for; add texts to it "
                "or ask for shorter lengths"
            )
        found: list[str] = []
        room = words
        for paragraph in [*self.paragraphs[first:], *self.paragraphs[:first]]:
            length = len(paragraph.split())
            if length > room:
                if start := _beginning(paragraph, room):
                    found.append(start)
                break
            found.append(paragraph)
            room -= length
        return found


def _beginning(paragraph: str, words: int) -> str:
    parts = sentences(paragraph)
    fits = [total <= words for total in accumulate(len(part.split()) for part in parts)]
    return " ".join(parts[: sum(fits)])


def hide(needle: str, pieces: list[str], depth: float) -> tuple[list[str], int]:
    """The pieces with the needle in one of them, and which one that is.

    The needle stands behind the last sentence that ends within `depth` per cent of the words, or at the very
    beginning where none does.
    """
    total = sum(len(piece.split()) for piece in pieces)
    place, offset, before = 0, 0, 0
    for number, piece in enumerate(pieces):
        for end in SENTENCE_END.finditer(piece):
            if before + len(piece[: end.end()].split()) <= total * depth / 100:
                place, offset = number, end.end()
        before += len(piece.split())
    piece = pieces[place]
    hidden = f"{piece[:offset]} {needle}{piece[offset:]}" if offset else f"{needle} {piece}"
    return [*pieces[:place], hidden, *pieces[place + 1 :]], place
