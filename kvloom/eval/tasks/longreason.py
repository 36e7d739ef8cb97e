"""LongReason (Ling et al., 2025), from the Hugging Face hub: multiple choice over long prompts.

`length` names the split: 8k to 128k tokens of text around the clues, "expanded" the clues in a passage,
"original" the bare question. Compress the prompt with -c. The data's alignment of answers was mended in May
2025; numbers from before do not compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvloom.eval.hub import hub_rows
from kvloom.eval.task import Task, TaskSet, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HUB = "lz1bytedance/LongReason"


@task_sets.register("longreason")
@dataclass(frozen=True, kw_only=True)
class LongReason(TaskSet):
    """LongReason (Ling et al., 2025)."""

    length: Literal["original", "expanded", "8k", "16k", "32k", "64k", "128k"] = "8k"

    judge = "letter"
    description = "multiple choice over prompts of 8k to 128k tokens; from the hub, for strong models"
    licence = "CC BY 4.0"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        for row in hub_rows(self.name, HUB, HUB, split=self.length):
            yield Task(
                id=str(row["example_idx"]), prompt=row["prompt"], answer=str(row["answer"]).strip().upper()
            )
