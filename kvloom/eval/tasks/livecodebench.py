"""LiveCodeBench (Jain et al., 2024), from the Hugging Face hub: programming problems, answers left unjudged.

Programs are generated and written into the results, for a sandbox of the user's to run; none is run here.
Read as its JSON lines, since `datasets` 4 and later do not run the loading script beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.eval.hub import hub_rows
from kvloom.eval.task import Task, TaskSet, task_sets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HUB = "livecodebench/code_generation_lite"


@task_sets.register("livecodebench")
@dataclass(frozen=True, kw_only=True)
class LiveCodeBench(TaskSet):
    """LiveCodeBench (Jain et al., 2024)."""

    file: str = "test.jsonl"  # test2.jsonl and so on hold what later releases added

    judge = "text"
    description = "programming problems; programs are written down, not run; from the hub, for strong models"
    licence = "CC"

    def tasks(self, data: Path | None) -> Iterator[Task]:
        path = f"hf://datasets/{HUB}/{self.file}"
        for row in hub_rows(self.name, HUB, "json", data_files={"test": path}, split="test"):
            starter = row.get("starter_code") or ""
            form = (
                f"Begin with this code:\n```python\n{starter}\n```"
                if starter.strip()
                else "Read from standard input and write to standard output."
            )
            prompt = f"{row['question_content']}\n\nWrite a Python program. {form}"
            yield Task(id=str(row["question_id"]), prompt=prompt)
