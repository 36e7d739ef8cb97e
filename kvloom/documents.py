"""Documents from a file, a folder or standard input: plain text, Markdown, JSON and JSON lines."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvloom.errors import DocumentError
from kvloom.prompt import Document, is_unicode
from kvloom.store.documents import as_id

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

EXTENSIONS = (".txt", ".md", ".markdown", ".jsonl", ".json")
_HEADING = re.compile(r"\s*#{1,6}[ \t]+(?P<title>[^\n]+?)(?:[ \t]+#+)?[ \t]*(?:\n|$)")


@dataclass
class LoadReport:
    """What `load_with_report` did with what it found."""

    num_files: int = 0  # files that were read
    num_other: int = 0  # files left alone because of their extension
    num_duplicates: int = 0  # documents dropped because an earlier one has the same text and title
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (file or file:line, why it was left out)


def load_documents(
    source: str | Path, *, stdin: IO[Any] | None = None, skip_bad: bool = False
) -> list[Document]:
    """The documents of a file, of a folder and all below it in sorted order, or of standard input for ``-``.

    Hidden files are left out. A file or line that cannot be used is a ``DocumentError``, or with `skip_bad` a
    logged warning; a source without any document is always a ``DocumentError``.
    """
    documents, report = load_with_report(source, stdin=stdin, skip_bad=skip_bad)
    for place, reason in report.skipped:
        logger.warning("%s left out: it %s", place, reason)
    return documents


def load_with_report(
    source: str | Path, *, stdin: IO[Any] | None = None, skip_bad: bool = False
) -> tuple[list[Document], LoadReport]:
    """The documents as `load_documents` gives them, and an account of what was left out."""
    report = LoadReport()
    loader = _Loader(report, skip_bad)
    if str(source) == "-":
        found = loader.from_stdin(sys.stdin if stdin is None else stdin)
        wanted = "standard input holds no document"
    else:
        path = Path(source)
        found = loader.from_path(path)
        wanted = f"{path} holds no document; looked for {', '.join(EXTENSIONS)} files that are not empty"
    unique: dict[tuple[str, str | None], Document] = {}
    for document in found:
        if (document.text, document.title) in unique:
            report.num_duplicates += 1
        unique.setdefault((document.text, document.title), document)
    if not unique:
        reasons = "".join(f"; {place} {reason}" for place, reason in report.skipped[:3])
        raise DocumentError(wanted + reasons)
    return list(unique.values()), report


class _Loader:
    def __init__(self, report: LoadReport, skip_bad: bool) -> None:
        self.report = report
        self.skip_bad = skip_bad

    def bad(self, place: str, reason: str) -> None:
        """Notes that `place` was left out, or raises."""
        if not self.skip_bad:
            raise DocumentError(f"{place} {reason}")
        self.report.skipped.append((place, reason))

    def from_stdin(self, stream: IO[Any]) -> Iterator[Document]:
        raw = getattr(stream, "buffer", stream).read()
        text = _normal(raw) if isinstance(raw, str) else self.decode("standard input", raw)
        if text is None:
            return
        self.report.num_files += 1
        first = next((line for line in text.split("\n") if line.strip()), "")
        if first.lstrip().startswith("{") and _is_json(first):
            yield from self.from_json_lines("standard input", "stdin", text)
        else:
            yield from self.from_text("standard input", "stdin", text)

    def from_path(self, path: Path) -> Iterator[Document]:
        if path.is_dir():
            for file in self.files(path):
                if file.suffix.lower() in EXTENSIONS:
                    yield from self.from_file(file, as_id(file.relative_to(path).as_posix()))
                else:
                    self.report.num_other += 1
        elif not path.exists():
            raise DocumentError(f"{path} does not exist; give a file, a folder, or - for standard input")
        elif path.suffix.lower() not in EXTENSIONS:
            raise DocumentError(f"{path} is not one of {', '.join(EXTENSIONS)}; rename or convert it")
        else:
            yield from self.from_file(path, as_id(path.name))

    def files(self, folder: Path) -> list[Path]:
        """All files below `folder` that are not hidden, sorted by path; each folder is entered once."""
        files, folders, links, entered = [], [folder], [], set()
        while folders or links:
            # links last, so that a document's id is its path without links where there is one
            current = folders.pop() if folders else links.pop(0)
            try:
                status = current.stat()
                entries = sorted(entry for entry in current.iterdir() if not entry.name.startswith("."))
            except OSError as error:
                self.bad(str(current), f"cannot be read: {error.strerror}")
                continue
            if (status.st_dev, status.st_ino) in entered:
                continue
            entered.add((status.st_dev, status.st_ino))
            for entry in entries:
                (files if not entry.is_dir() else links if entry.is_symlink() else folders).append(entry)
        return sorted(files, key=lambda file: file.parts)

    def from_file(self, path: Path, name: str) -> Iterator[Document]:
        try:
            if path.exists() and not path.is_file():
                self.bad(str(path), "is not a regular file")
                return
            raw = path.read_bytes()
        except OSError as error:
            self.bad(str(path), f"cannot be read: {error.strerror}")
            return
        text = self.decode(str(path), raw)
        if text is None:
            return
        self.report.num_files += 1
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            yield from self.from_json_lines(str(path), name, text)
        elif suffix == ".json":
            yield from self.from_json(str(path), name, text)
        else:
            yield from self.from_text(str(path), name, text, markdown=suffix != ".txt")

    def decode(self, place: str, raw: bytes) -> str | None:
        if b"\0" in raw:
            return self.bad(place, "is binary (it holds NUL bytes); save it as UTF-8 text")
        try:
            return _normal(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            return self.bad(f"{place}:{line}", "is not UTF-8; save the file as UTF-8 text")

    def from_text(self, place: str, name: str, text: str, *, markdown: bool = False) -> Iterator[Document]:
        heading = _HEADING.match(text) if markdown else None
        title = None
        if heading and text[heading.end() :].strip():
            title, text = heading["title"].strip(), text[heading.end() :]
        text = text.strip("\n").rstrip()
        if text.strip():
            yield Document(text, name, title)
        else:
            self.report.skipped.append((place, "is empty"))

    def from_json_lines(self, place: str, name: str, text: str) -> Iterator[Document]:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.bad(f"{place}:{number}", f"is not JSON: {_reason(error)}")
                continue
            yield from self.from_object(f"{place}:{number}", f"{name}#{number}", value)

    def from_json(self, place: str, name: str, text: str) -> Iterator[Document]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            yield from self.from_json_lines(place, name, text)
            return
        if not isinstance(value, list):
            yield from self.from_object(place, name, value)
            return
        for number, item in enumerate(value, 1):
            yield from self.from_object(f"{place}, item {number},", f"{name}#{number}", item)

    def from_object(self, place: str, name: str, value: Any) -> Iterator[Document]:
        if not isinstance(value, dict):
            return self.bad(place, f'is not a JSON object with a "text", but {type(value).__name__}')
        text, title, own_id = value.get("text"), value.get("title"), value.get("id")
        if not isinstance(text, str):
            return self.bad(place, 'has no "text" that is a string')
        if not isinstance(title, str | None):
            return self.bad(place, f'has a "title" that is not a string but {type(title).__name__}')
        if isinstance(own_id, bool) or not isinstance(own_id, str | int | None):
            return self.bad(place, f'has an "id" that is not a string but {type(own_id).__name__}')
        if not (is_unicode(text) and is_unicode(title or "")):
            return self.bad(place, "holds half a character (a lone surrogate)")
        text = _normal(text).strip("\n").rstrip()
        if not text.strip():
            self.report.skipped.append((place, 'has an empty "text"'))
            return
        id = as_id("" if own_id is None else str(own_id))
        yield Document(text, id if id.strip() else name, title or None)


def _normal(text: str) -> str:
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").replace("\r\n", "\n").replace("\r", "\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
