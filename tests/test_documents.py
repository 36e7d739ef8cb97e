from __future__ import annotations

import io
import json
import logging
import os
from typing import TYPE_CHECKING

import pytest

from kvloom.documents import load_documents, load_with_report
from kvloom.errors import DocumentError
from kvloom.prompt import Document

if TYPE_CHECKING:
    from pathlib import Path


def lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values)


def test_folder_in_sorted_order(tmp_path: Path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a.md").write_text("# First #\n\nBody.\n")
    (tmp_path / "sub" / "deep" / "c.TXT").write_text("Third.")
    (tmp_path / "sub.txt").write_text("Fourth.")
    for ignored in (".hidden/x.txt", ".x.txt", "sub/.y.md"):
        (tmp_path / ignored).write_text("hidden")
    for other in ("z.pdf", "sub/README"):
        (tmp_path / other).write_bytes(b"\0\xff")
    documents, report = load_with_report(tmp_path)
    assert documents == [
        Document("Body.", "a.md", "First"),
        Document("Second.", "b.txt"),
        Document("Third.", "sub/deep/c.TXT"),
        Document("Fourth.", "sub.txt"),
    ]
    assert (report.num_files, report.num_other, report.num_duplicates, report.skipped) == (4, 2, 0, [])
    assert load_documents(str(tmp_path)) == documents


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("\n## Deep title\nBody\n# Other", Document("Body\n# Other", "f.md", "Deep title")),
        ("Intro\n# Title\nBody", Document("Intro\n# Title\nBody", "f.md")),
        ("#hashtag\nBody", Document("#hashtag\nBody", "f.md")),
        ("# Only a title\n", Document("# Only a title", "f.md")),
        ("\n\n    code first\n", Document("    code first", "f.md")),
    ],
)
def test_markdown_title(tmp_path: Path, text: str, document: Document):
    (tmp_path / "f.md").write_text(text)
    assert load_documents(tmp_path / "f.md") == [document]
    (tmp_path / "f.txt").write_text("# Not a title\nBody")
    assert load_documents(tmp_path / "f.txt") == [Document("# Not a title\nBody", "f.txt")]


def test_bom_and_line_ends(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\r\n")
    (tmp_path / "b.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n\r\n{"text": "c\xe2\x80\xa8d"}\r\n'
    )
    assert [(document.id, document.text) for document in load_documents(tmp_path)] == [
        ("a.txt", "one\ntwo\nthree"),
        ("b.jsonl#1", "a\nb"),
        ("b.jsonl#3", "c\u2028d"),
    ]


def test_json(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(
        "\n" + lines({"text": "A", "id": 7, "title": "T", "more": 1}, {"text": "B"})
    )
    (tmp_path / "b.json").write_text(json.dumps([{"text": "C"}, {"text": "D", "id": "d"}], indent=2))
    (tmp_path / "c.json").write_text(json.dumps({"text": "E"}, indent=2))
    (tmp_path / "d.json").write_text(lines({"text": "F"}, {"text": "G"}))
    assert load_documents(tmp_path) == [
        Document("A", "7", "T"),
        Document("B", "a.jsonl#3"),
        Document("C", "b.json#1"),
        Document("D", "d"),
        Document("E", "c.json"),
        Document("F", "d.json#1"),
        Document("G", "d.json#2"),
    ]


BAD = [
    ("f.txt", b"a\0b", r"f\.txt is binary \(it holds NUL bytes\)"),
    ("f.md", b"one\ntwo \xff", r"f\.md:2 is not UTF-8"),
    (
        "f.jsonl",
        b'{"text": "a"}\n{"text": ',
        r"f\.jsonl:2 is not JSON: expecting value at column 10|f\.jsonl:2 is not JSON",
    ),
    ("f.jsonl", b"[1]", r"f\.jsonl:1 is not a JSON object with a \"text\", but list"),
    ("f.jsonl", b'\n{"txt": "a"}', r'f\.jsonl:2 has no "text" that is a string'),
    ("f.jsonl", b'{"text": 5}', r'f\.jsonl:1 has no "text" that is a string'),
    ("f.jsonl", b'{"text": "a", "title": 5}', r'f\.jsonl:1 has a "title" that is not a string but int'),
    ("f.jsonl", b'{"text": "a", "id": [5]}', r'f\.jsonl:1 has an "id" that is not a string but list'),
    ("f.json", b'[{"text": "a"}, 5]', r"f\.json, item 2, is not a JSON object"),
    ("f.json", b"{\n", r"f\.json:1 is not JSON"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_files_and_lines(tmp_path: Path, caplog, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("Good.")
    with pytest.raises(DocumentError, match=message):
        load_documents(tmp_path)
    documents, report = load_with_report(tmp_path, skip_bad=True)
    assert Document("Good.", "good.txt") in documents
    assert len(report.skipped) == 1
    assert report.skipped[0][0].startswith(str(tmp_path / name))
    with caplog.at_level(logging.WARNING):
        assert load_documents(tmp_path, skip_bad=True) == documents
    assert f"{report.skipped[0][0]} left out: it {report.skipped[0][1]}" in caplog.text


def test_a_bad_line_costs_no_good_one(tmp_path: Path):
    (tmp_path / "f.jsonl").write_text('{"text": "a"}\nnot json\n{"text": "b"}')
    documents, report = load_with_report(tmp_path, skip_bad=True)
    assert [document.id for document in documents] == ["f.jsonl#1", "f.jsonl#3"]
    assert report.skipped == [(f"{tmp_path / 'f.jsonl'}:2", "is not JSON: Expecting value at column 1")]


def test_duplicates(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(
        lines({"text": "A"}, {"text": "A", "title": "T"}, {"text": "A", "id": "x"})
    )
    (tmp_path / "b.txt").write_text("A\n")
    documents, report = load_with_report(tmp_path)
    assert documents == [Document("A", "a.jsonl#1"), Document("A", "a.jsonl#2", "T")]
    assert report.num_duplicates == 2


def test_nothing_there(tmp_path: Path):
    with pytest.raises(DocumentError, match="missing does not exist; give a file, a folder"):
        load_documents(tmp_path / "missing")
    with pytest.raises(
        DocumentError, match=r"holds no document; looked for \.txt, \.md, \.markdown, \.jsonl, \.json"
    ):
        load_documents(tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.jsonl").write_text(lines({"text": " "}))
    with pytest.raises(DocumentError, match=r"a\.txt is empty; .*b\.jsonl:1 has an empty"):
        load_documents(tmp_path)
    (tmp_path / "c.pdf").write_text("x")
    with pytest.raises(DocumentError, match=r"c\.pdf is not one of \.txt"):
        load_documents(tmp_path / "c.pdf")
    (tmp_path / "d.txt").write_text("D")
    documents, report = load_with_report(tmp_path)
    assert documents == [Document("D", "d.txt")]
    assert [reason for _, reason in report.skipped] == ["is empty", 'has an empty "text"']


def test_links(tmp_path: Path):
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "sub" / "a.txt").write_text("A")
    (tmp_path / "elsewhere" / "b.txt").write_text("B")
    (root / "again").symlink_to(root / "sub")
    (root / "sub" / "loop").symlink_to(root)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert [document.id for document in load_documents(root)] == ["linked/b.txt", "sub/a.txt"]
    (root / "broken.txt").symlink_to(root / "nowhere")
    with pytest.raises(DocumentError, match=r"broken\.txt cannot be read: No such file"):
        load_documents(root)
    (root / "broken.txt").unlink()
    os.mkfifo(root / "pipe.txt")
    with pytest.raises(DocumentError, match=r"pipe\.txt is not a regular file"):
        load_documents(root)


class Terminal:
    """A text stream over bytes, as sys.stdin is."""

    def __init__(self, raw: bytes) -> None:
        self.buffer = io.BytesIO(raw)


def test_stdin():
    assert load_documents("-", stdin=io.StringIO("Just\r\ntext.\n")) == [Document("Just\ntext.", "stdin")]
    json_lines = "\n" + lines({"text": "A"}, {"text": "B", "id": "b"})
    assert load_documents("-", stdin=io.StringIO(json_lines)) == [
        Document("A", "stdin#2"),
        Document("B", "b"),
    ]
    assert load_documents("-", stdin=io.StringIO("{not json}\nx")) == [Document("{not json}\nx", "stdin")]
    assert load_documents("-", stdin=io.StringIO("[1, 2]")) == [Document("[1, 2]", "stdin")]
    assert load_documents("-", stdin=io.BytesIO(b"\xef\xbb\xbfbytes")) == [Document("bytes", "stdin")]
    with pytest.raises(DocumentError, match="standard input:2 is not JSON"):
        load_documents("-", stdin=io.StringIO('{"text": "A"}\nx'))
    with pytest.raises(DocumentError, match="standard input holds no document"):
        load_documents("-", stdin=io.StringIO("\n"))
    with pytest.raises(DocumentError, match="standard input:1 is not UTF-8"):
        load_documents("-", stdin=Terminal(b"\xff"))  # type: ignore[arg-type]


def test_stdin_by_default(monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("é".encode()))
    assert load_documents("-") == [Document("é", "stdin")]
