"""AIME 2024, from the Hugging Face hub: 30 problems of a competition, whose answer is a whole number.

For models that can reason; a model of 135 million parameters solves none of them, compressed or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.eval.hub import hub_rows
from kvloom.eval.task import Task, TaskSet, plain_number, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HUB = "HuggingFaceH4/aime_2024"


@task_sets.register("aime")
@dataclass(frozen=True, kw_only=True)
class AIME(TaskSet):
    """AIME 2024."""

    judge = "number"
    description = "competition problems with whole numbers as answers; from the hub, for strong models"
    licence = "unknown"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        for row in hub_rows(self.name, HUB, HUB, split="train"):
            yield Task(
                id=str(row["id"]),
                prompt=f"{row['problem']}\n\nSolve it step by step, and end with: The answer is NUMBER.",
                answer=plain_number(str(row["answer"])),
            )
