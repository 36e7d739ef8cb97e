"""Task: a prompt whose answer is long enough to be compressed while it grows. Each set of them is one file in
`kvloom.eval.tasks`.

The data lies in the folder that `kvloom.eval.benchmark` describes; sets that are on the Hugging Face hub only
are read there. Programs that a model writes are never run.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvloom.errors import EvalError, MethodError
from kvloom.eval.benchmark import data_folder
from kvloom.eval.runner import split_method
from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Judge = Literal["number", "letter", "instructions", "text", "none"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and what is known of its answer. Raises ``EvalError`` for a task without a prompt."""

    id: str
    prompt: str
    answer: str = ""  # the number or the letter that is right
    reference: str = ""  # a right answer written out, run teacher-forced; empty: there is none
    instructions: tuple[tuple[str, dict[str, Any]], ...] = ()  # id and arguments
    is_chat: bool = True  # a user's turn; else the prompt goes on as plain text

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise EvalError(f"task {self.id!r} has no prompt")


@dataclass(frozen=True, kw_only=True)
class TaskSet(ABC):
    """Base of all sets. Options are fields, so ``repr(task_set)`` says which tasks were asked for."""

    name: ClassVar[str]
    judge: ClassVar[Judge]  # how a generated answer is judged; text: not at all; none: none is generated
    description: ClassVar[str]
    licence: ClassVar[str]  # of the data

    @abstractmethod
    def tasks(self, data: Path | None) -> Iterator[Task]:
        """All tasks, in the same order each time; `data` is the data folder, None where there is none.

        Raises ``EvalError``, at the latest when iterated, for data that is not there or cannot be read.
        """


task_sets: Registry[TaskSet] = Registry("task", "kvloom.eval.tasks")


def read_task_sets(texts: Sequence[str]) -> list[TaskSet]:
    """The sets of ``NAME`` or ``NAME:OPTION=VALUE,...``; raises ``MethodError`` for an unknown one, and one
    named twice.
    """
    found = [task_sets.build(*split_method(text)) for text in texts]
    names = [task_set.name for task_set in found]
    if len(set(names)) < len(names):
        raise MethodError(f"a task set is named twice: {', '.join(names)}")
    return found


def take_tasks(task_set: TaskSet, data: str | Path | None = None, limit: int | None = None) -> list[Task]:
    """The first `limit` tasks of the set, or all, read from the folder `data` or ``$KVLOOM_DATA``.

    Raises ``EvalError`` for data that is missing or broken, an id that comes twice, and a set without tasks.
    """
    found = list(islice(task_set.tasks(data_folder(data)), limit))
    if not found:
        raise EvalError(f"{task_set.name} has no tasks; look at its data file")
    ids = [task.id for task in found]
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice:
        raise EvalError(f"{task_set.name}: the id {twice[0]!r} stands twice in the data")
    return found


def digest(tasks: Sequence[Task]) -> str:
    """SHA-256, in hex, over all that the tasks hold, in order."""
    total = hashlib.sha256()
    for task in tasks:
        total.update(json.dumps(asdict(task), sort_keys=True).encode() + b"\n")
    return total.hexdigest()


def read_rows(task_set: TaskSet, data: Path | None, file: str, fields: Iterable[str]) -> Iterator[Any]:
    """The JSON lines of ``data/file``, each with these fields; raises ``EvalError`` that names the line."""
    if data is None:
        raise EvalError(f"{task_set.name}: name a data folder with --data or KVLOOM_DATA, with {file} in it")
    path = data / file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EvalError(f"{task_set.name}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EvalError(f"{task_set.name}: {path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            missing = [field for field in fields if field not in row]
        except (ValueError, TypeError):
            raise EvalError(f"{path}:{number}: not a JSON object") from None
        if missing:
            raise EvalError(f"{path}:{number}: has no {', '.join(missing)}")
        yield row


# --- what an answer says


def last_number(text: str) -> str | None:
    """The last number in the text, without separators, currency, and zeros behind the point."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
    return plain_number(found[-1]) if found else None


def plain_number(text: str) -> str:
    """``1,200.50`` as ``1200.5``, ``077`` as ``77``; what is no number as it is."""
    bare = text.replace(",", "").replace("$", "").strip()
    try:
        value = float(bare)
    except ValueError:
        return bare
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def last_letter(text: str) -> str | None:
    """The letter that the text settles on: the last behind "answer is" or "answer:", else the last that
    stands alone or in brackets.
    """
    named = re.findall(r"answer\s*(?:is|:)\s*[\"'(*]*([A-J])\b", text, re.IGNORECASE)
    alone = re.findall(r"\(([A-J])\)|(?<![\w'])([B-J])(?![\w'])", text)
    found = named or [first or second for first, second in alone]
    return found[-1].upper() if found else None
