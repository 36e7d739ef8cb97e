"""Retriever: the documents that a question is most likely about, by BM25."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvloom.errors import DocumentError, KVLoomError
from kvloom.prompt import Document, as_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# scripts written without blanks between words: kana, Han, Hangul
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")
_WORD = re.compile(r"\w+")


class Retriever:
    """Finds documents by the words they share with a question; titles count as text.

    Raises ``DocumentError`` when there is no document.
    """

    def __init__(self, documents: Iterable[str | Document]) -> None:
        texts = [f"{document.title or ''}\n{document.text}" for document in map(as_document, documents)]
        if not texts:
            raise DocumentError("there is no document to search; give at least one")
        self.num_documents = len(texts)
        self._vocabulary: dict[str, int] = {}
        corpus = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words(text)]
            for text in texts
        ]
        self._index = _bm25(corpus, self._vocabulary) if self._vocabulary else None

    def scores(self, question: str) -> np.ndarray:
        """The BM25 score of each document, (documents,) float32; 0 where no word of `question` stands."""
        known = [self._vocabulary[word] for word in words(question) if word in self._vocabulary]
        if self._index is None or not known:
            return np.zeros(self.num_documents, dtype=np.float32)
        return self._index.get_scores_from_ids(known)

    def top(self, question: str, k: int) -> list[int]:
        """The indices of the `k` best documents, best first, and the earlier first among equals.

        All documents when there are fewer. Raises ``ValueError`` when `k` is not positive.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        return np.argsort(-self.scores(question), kind="stable")[:k].tolist()


def words(text: str) -> list[str]:
    """The lower-case words of `text`; of scripts without blanks the characters and their pairs."""
    found = []
    for word in _WORD.findall(text.casefold()):
        end = 0
        for run in _UNSPACED.finditer(word):
            found += [word[end : run.start()], *run.group(), *map("".join, pairwise(run.group()))]
            end = run.end()
        found.append(word[end:])
    return [word for word in found if word]


def _bm25(corpus: Sequence[Sequence[int]], vocabulary: dict[str, int]):
    try:
        import bm25s
    except ImportError:
        raise KVLoomError("searching documents needs bm25s; pip install bm25s") from None
    index = bm25s.BM25()
    index.index((corpus, vocabulary), show_progress=False)
    return index
