from __future__ import annotations

import math
import subprocess
import sys

import pytest

from kvloom.errors import DocumentError
from kvloom.prompt import Document
from kvloom.retrieve import Retriever, words

DOCUMENTS = [
    "The river Seine flows through Paris.",
    "Berlin lies on the Spree.",
    Document("It has two million people.", title="Paris"),
    "Paris, Paris, Paris: a film about a film.",
]


def test_words():
    assert words("The Cat's CAFÉ, 2 straße_x") == ["the", "cat", "s", "café", "2", "strasse_x"]
    assert words("東京都ABC") == ["東", "京", "都", "東京", "京都", "abc"]
    assert words("go言語") == ["go", "言", "語", "言語"]
    assert words("…!") == []


def test_best_first_and_titles_count():
    retriever = Retriever(DOCUMENTS)
    assert retriever.top("What does Berlin lie on?", 1) == [1]
    assert retriever.top("million people in Paris", 1) == [2]
    assert set(retriever.top("PARIS", 3)) == {0, 2, 3}
    assert retriever.top("Paris", 4)[-1] == 1


def test_scores_are_bm25():
    """Lucene's BM25, k1 = 1.5 and b = 0.75, by hand: three documents of 2, 1 and 3 words."""
    retriever = Retriever(["cat dog", "dog", "cat cat fox"])
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def term(count: int, length: int) -> float:
        return idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / 2))

    assert retriever.scores("cat").tolist() == pytest.approx([term(1, 2), 0, term(2, 3)], rel=1e-5)
    assert retriever.top("cat", 3) == [2, 0, 1]
    assert retriever.scores("cat dog").tolist() == pytest.approx(
        [2 * term(1, 2), term(1, 1), term(2, 3)], rel=1e-5
    )


def test_ties_go_to_the_earlier_document():
    retriever = Retriever(["x", "same words", "y", "same words", "same words"])
    assert retriever.top("same", 2) == [1, 3]
    assert retriever.top("same", 5) == [1, 3, 4, 0, 2]
    assert Retriever(["same", "x"] * 50).top("same", 100) == [*range(0, 100, 2), *range(1, 100, 2)]


def test_unknown_words_give_the_first_documents():
    assert Retriever(DOCUMENTS).top("zebra", 2) == [0, 1]
    assert Retriever(DOCUMENTS).top("", 2) == [0, 1]
    assert Retriever(["!", "?"]).top("zebra", 5) == [0, 1]


def test_scripts_without_blanks():
    retriever = Retriever(
        ["大阪は西にある。", "東京は日本の首都です。", "京都は古い。", "서울은 한국의 수도이다."]
    )
    assert retriever.top("日本の首都はどこですか", 1) == [1]
    assert retriever.top("京都", 1) == [2]
    assert retriever.top("한국 수도", 1) == [3]


def test_arguments():
    assert Retriever(DOCUMENTS).top("Paris", 99) == Retriever(DOCUMENTS).top("Paris", 4)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        Retriever(DOCUMENTS).top("Paris", 0)
    with pytest.raises(DocumentError, match="no document to search"):
        Retriever([])


def test_searching_is_silent_and_imported_late():
    code = (
        "import sys, kvloom.retrieve\n"
        "assert 'bm25s' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert kvloom.retrieve.Retriever(['a b', 'b c']).top('c', 1) == [1]"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
