"""Run folders survive texts and crashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvloom.errors import EvalError
from kvloom.eval.journal import Journal, read_lines

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Asked:
    sets: str = "small"


def opened(folder: Path) -> Journal:
    return Journal(folder, Asked(), ("sample",))


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\x85b", "a\nb", "\ud800", "\u00e9\U0001f600"])
def test_whatever_a_model_says_is_one_line(tmp_path: Path, text: str) -> None:
    journal = opened(tmp_path)
    for sample in ("1", "2"):
        journal.write({"sample": sample, "text": text})
    assert [line["text"] for line in read_lines(journal.results)] == [text, text]
    assert opened(tmp_path).done == {("1",), ("2",)}


@pytest.mark.parametrize("end", [b"1", b"null", b'{"text": 3}', b'{"sample": "\xc3', b"[" * 10**5])
def test_a_line_that_is_no_result_is_not_done_and_hides_no_other(tmp_path: Path, end: bytes) -> None:
    journal = opened(tmp_path)
    journal.write({"sample": "1"})
    with journal.results.open("ab") as file:
        file.write(end)
    again = opened(tmp_path)
    assert again.done == {("1",)}
    again.write({"sample": "2"})
    assert opened(tmp_path).done == {("1",), ("2",)}


@pytest.mark.parametrize("content", ["", "{", "3", "[1]"])
def test_a_recipe_that_cannot_be_read_is_a_sentence(tmp_path: Path, content: str) -> None:
    opened(tmp_path)
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(EvalError, match="is not the recipe of a run; give another --out folder"):
        opened(tmp_path)
