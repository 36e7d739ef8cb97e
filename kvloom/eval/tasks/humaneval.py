"""HumanEval (Chen et al., 2021): the log-likelihood of the reference solution behind the function's head.

No program is generated and none is run: that would take a sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.eval.task import Task, TaskSet, read_rows, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@task_sets.register("humaneval")
@dataclass(frozen=True, kw_only=True)
class HumanEval(TaskSet):
    """HumanEval (Chen et al., 2021)."""

    judge = "none"
    description = "Python functions to complete; log-likelihood of the reference only"
    licence = "MIT"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        for row in read_rows(self, data, "humaneval/humaneval.jsonl", ("id", "question", "answers")):
            yield Task(id=row["id"], prompt=row["question"], reference=row["answers"][0], is_chat=False)
