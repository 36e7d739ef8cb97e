"""GSM8K (Cobbe et al., 2021), test: word problems with worked answers, whose last number is right or wrong.

The reference is the worked answer without the calculator's marks (``<<2+3=5>>``), with the sentence that the
prompt asks for at its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.eval.task import Task, TaskSet, read_rows, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@task_sets.register("gsm8k")
@dataclass(frozen=True, kw_only=True)
class GSM8K(TaskSet):
    """GSM8K (Cobbe et al., 2021), test."""

    judge = "number"
    description = "grade-school word problems, solved step by step"
    licence = "MIT"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        for row in read_rows(self, data, "gsm8k/gsm8k.jsonl", ("id", "question", "answers", "worked_answer")):
            worked, answer = re.sub(r"<<.*?>>", "", row["worked_answer"]), str(row["answers"][0])
            yield Task(
                id=row["id"],
                prompt=f"{row['question']}\n\nSolve it step by step, and end with: The answer is NUMBER.",
                answer=answer,
                reference=f"{worked}\nThe answer is {answer}.",
            )
