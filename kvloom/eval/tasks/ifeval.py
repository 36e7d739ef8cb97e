"""IFEval (Zhou et al., 2023): prompts with instructions that a program can check.

From the data folder, or without one from the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.errors import EvalError
from kvloom.eval.hub import hub_rows
from kvloom.eval.task import Task, TaskSet, read_rows, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HUB = "google/IFEval"


@task_sets.register("ifeval")
@dataclass(frozen=True, kw_only=True)
class IFEval(TaskSet):
    """IFEval (Zhou et al., 2023)."""

    judge = "instructions"
    description = "prompts with instructions that a program can check"
    licence = "Apache-2.0"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        fields = ("id", "question", "instruction_id_list", "kwargs")
        if data is None:
            otherwise = "name a data folder with --data or KVLOOM_DATA"
            rows = hub_rows(self.name, HUB, HUB, otherwise=otherwise, split="train")
            fields = ("key", "prompt", *fields[2:])
        else:
            rows = read_rows(self, data, "ifeval/ifeval.jsonl", fields)
        for row in rows:
            id, prompt, instructions, arguments = (row[field] for field in fields)
            given = [  # rows of the hub hold every argument there is, None where it is another's
                {name: value for name, value in (named or {}).items() if value is not None}
                for named in arguments
            ]
            if len(instructions) != len(given):
                raise EvalError(f"ifeval: {id} has {len(instructions)} instructions and {len(given)} kwargs")
            pairs = tuple(zip(instructions, given, strict=True))
            yield Task(id=str(id), prompt=prompt, instructions=pairs)
