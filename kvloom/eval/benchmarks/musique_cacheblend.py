"""MuSiQue in the form in which CacheBlend (Yao et al., EuroSys 2025) reads it.

A sample::

    question   "Who is the uncle of Ada Example?"
    answers    ("Bob Example",)
    documents  10 chunks of about 400 words, cut without regard to paragraphs; lower case, spaces around
               punctuation, no titles
    supporting ()
    kind       "answer found" or "answer not found": whether an answer stands word for word in a chunk, which
               it does not in about a fifth of the samples
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvloom.eval.benchmark import Sample, benchmarks
from kvloom.eval.sources import PassageSet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@benchmarks.register("musique_cacheblend")
@dataclass(frozen=True, kw_only=True)
class MuSiQueCacheBlend(PassageSet):
    """MuSiQue in CacheBlend's form, each sample marked by whether its chunks hold the answer."""

    version = "1"
    is_multihop = True
    description = "MuSiQue questions over ten chunks that ignore paragraphs; a fifth cannot be answered"
    licence = "CC BY 4.0; passages: Wikipedia, CC BY-SA"
    file = "musique_cacheblend/musique_cacheblend"
    home = "https://github.com/YaoJiayi/CacheBlend"

    def samples(self, data: Path | None) -> Iterator[Sample]:
        return map(_marked, super().samples(data))


def _marked(sample: Sample) -> Sample:
    texts = [_words(document.text) for document in sample.documents]
    is_found = any(_words(answer) in text for answer in sample.answers for text in texts)
    return replace(sample, kind="answer found" if is_found else "answer not found")


def _words(text: str) -> str:
    """The words, each between blanks. Punctuation parts words, since the chunks have blanks around it."""
    words = re.findall(r"[^\W_]+", text.lower())
    return f" {' '.join(word for word in words if word not in ('a', 'an', 'the'))} "
