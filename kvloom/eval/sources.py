"""Where samples come from: JSON lines in the data folder, and LongBench on the Hugging Face hub.

A line of a data file is one sample::

    {"id": "h1", "question": "...", "answers": ["..."], "passages": [{"title": "...", "text": "..."}],
     "supporting": [0, 3], "type": "bridge"}                        # the last two only where they are known
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from kvloom.errors import EvalError
from kvloom.eval.benchmark import Benchmark, Sample
from kvloom.eval.hub import hub_rows
from kvloom.eval.passages import cut, paragraphs, split_passages
from kvloom.prompt import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_FORMAT = "one JSON object a line with id, question, answers and passages"
_CHOOSE_FOLDER = "name a data folder with --data or KVLOOM_DATA"
# The data itself, since the loading script beside it is no longer run by `datasets` 4 and later.
LONGBENCH = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
_PLAIN_WORDS = 200  # a passage of a LongBench text that has no passages of its own, about 300 tokens


class _Passage(BaseModel):
    model_config = ConfigDict(strict=True)
    title: str = ""
    text: str


class _Line(BaseModel):
    """A sample's line; keys that only single sets have are not read."""

    model_config = ConfigDict(strict=True)
    id: str
    question: str
    answers: list[str]
    passages: list[_Passage]
    supporting: list[int] = []
    type: str = ""


@dataclass(frozen=True, kw_only=True)
class PassageSet(Benchmark):
    """A set that is one file in the data folder and, for some, one on LongBench."""

    file: ClassVar[str]  # in the data folder, without .jsonl or .jsonl.gz
    home: ClassVar[str]  # where the original is
    longbench: ClassVar[str | None] = None  # its name on LongBench

    def samples(self, data: Path | None) -> Iterator[Sample]:
        if data is not None:
            return self.from_file(data, self.file)
        if self.longbench is not None:
            return self.from_hub(self.longbench)
        raise EvalError(f"{self.name}: {_CHOOSE_FOLDER}, with {self.file}.jsonl in it: {self._recipe()}")

    def from_file(self, data: Path, file: str) -> Iterator[Sample]:
        """The samples of ``data/file.jsonl``, or of the gzip of it."""
        for path in (data / f"{file}.jsonl", data / f"{file}.jsonl.gz"):
            if path.is_file():
                return read_json_lines(path)
        hub = f", or name no data folder to read {self.longbench} of LongBench" if self.longbench else ""
        raise EvalError(
            f"{self.name}: {data / file}.jsonl is missing, and so is its .gz; make it, {self._recipe()}{hub}"
        )

    def from_hub(self, longbench: str) -> Iterator[Sample]:
        """The samples of LongBench's set `longbench`, whose gold passages and kinds are not known.

        LongBench joins the passages of its multi-hop sets; the other sets' contexts are plain texts.
        """
        rows = longbench_rows(self.name, longbench)
        return (longbench_sample(row, has_passages=self.is_multihop) for row in rows)

    def _recipe(self) -> str:
        return f"{_FORMAT}, from {self.home}"


def read_json_lines(path: Path) -> Iterator[Sample]:
    """The samples of a file, gzip or not, in its order; raises ``EvalError`` that names file and line."""
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):  # noqa: B007  for the message below
                if line.strip():
                    yield _sample(line)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise EvalError(f"{path}:{number}: {place + ': ' if place else ''}{fault['msg']}") from None
    except EvalError as error:
        raise EvalError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read after line {number}: {error}") from error


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast("IO[str]", gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _sample(line: str) -> Sample:
    row = _Line.model_validate_json(line)
    return Sample(
        id=row.id,
        question=row.question,
        answers=tuple(row.answers),
        documents=_documents(row.id, ((passage.title, passage.text) for passage in row.passages)),
        supporting=tuple(row.supporting),
        kind=row.type,
    )


def longbench_rows(name: str, longbench: str) -> Iterable[dict[str, Any]]:
    """LongBench's rows for the set `name`, from the hub or its local cache.

    Raises ``EvalError`` without the package `datasets` and for whatever `datasets` raises.
    """
    member = f"zip://data/{longbench}.jsonl::{LONGBENCH}"
    return hub_rows(
        name,
        f"LongBench's {longbench}",
        "json",
        source="LongBench",
        otherwise=_CHOOSE_FOLDER,
        data_files={"test": member},
        split="test",
    )


def longbench_sample(row: dict[str, Any], *, has_passages: bool) -> Sample:
    """A row of LongBench as a sample: its passages, or a plain text cut at paragraphs.

    Raises ``EvalError`` where passages are expected and the context does not begin with ``Passage 1:``.
    """
    if has_passages:
        passages = split_passages(row["context"])
        if not passages:
            raise EvalError(f"LongBench row {row['_id']!r}: the context does not begin with 'Passage 1:'")
    else:
        passages = [("", part) for part in cut(paragraphs(row["context"]), _PLAIN_WORDS)]
    return Sample(
        id=row["_id"],
        question=row["input"],
        answers=tuple(cast("list[str]", row["answers"])),
        documents=_documents(row["_id"], passages),
    )


def _documents(id: str, passages: Iterable[tuple[str, str]]) -> tuple[Document, ...]:
    return tuple(
        Document(text, id=f"{id}/{place}", title=title or None)
        for place, (title, text) in enumerate(passages)
    )
