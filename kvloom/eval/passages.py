"""Passages into one long text, in LongBench's layout, and long texts into passages."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvloom.prompt import Document

# The end of a sentence, closing quotes included; titles and initials ("Mr.", "J.") do not end one.
SENTENCE_END = re.compile(
    r"""(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?]+["')\]\u201d\u2019_]*(?=\s|$)"""
)
_HEAD = re.compile(r"^Passage (\d+):[ \t]*\n", re.MULTILINE)


def join_passages(documents: Iterable[Document]) -> str:
    """The documents as one text: ``Passage N:``, title, text, with an empty line between two passages."""
    return "\n\n".join(
        "\n".join([f"Passage {number}:", *([document.title] if document.title else []), document.text])
        for number, document in enumerate(documents, 1)
    )


def split_passages(text: str) -> list[tuple[str, str]]:
    """(title, text) of each passage of a joined text; empty when the text does not begin with ``Passage 1:``.

    A passage's first line is its title, so passages joined without a title do not come back as they were. A
    heading counts only where its number is the next one, since a passage may quote such a line.
    """
    heads: list[re.Match[str]] = []
    for head in _HEAD.finditer(text):
        if int(head[1]) == len(heads) + 1:
            heads.append(head)
    if not heads or text[: heads[0].start()].strip():
        return []
    edges = [*((head.start(), head.end()) for head in heads), (len(text), len(text))]
    passages = []
    for (_, start), (stop, _) in pairwise(edges):
        title, _, body = text[start:stop].strip().partition("\n")
        passages.append((title.strip(), body.strip()) if body.strip() else ("", title.strip()))
    return passages


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, which empty lines part, each on one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; joined by one blank they are the paragraph."""
    edges = [0, *(end.end() for end in SENTENCE_END.finditer(paragraph)), len(paragraph)]
    return [part for start, stop in pairwise(edges) if (part := paragraph[start:stop].strip())]


def cut(paragraphs: Iterable[str], words: int) -> list[str]:
    """Pieces of at most `words` words: as many whole paragraphs as fit, longer ones cut at sentences.

    A sentence longer than that is cut between words. No word is lost or changes its place.
    """
    pieces: list[str] = []
    room = 0
    for glue, part in _parts(paragraphs, words):
        length = len(part.split())
        if length > room:
            pieces.append(part)
            room = words - length
        else:
            pieces[-1] += glue + part
            room -= length
    return pieces


def _parts(paragraphs: Iterable[str], words: int) -> Iterator[tuple[str, str]]:
    """What must not be cut, each with what joins it to the part before it."""
    for paragraph in paragraphs:
        glue = "\n\n"
        whole = [paragraph] if len(paragraph.split()) <= words else sentences(paragraph)
        for part in whole:
            run = part.split()
            for start in range(0, len(run), words):
                yield glue, " ".join(run[start : start + words])
                glue = " "
