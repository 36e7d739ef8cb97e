"""NarrativeQA (Kocisky et al., TACL 2018): questions on a story, asked of its plot summary or of the story.

A sample::

    question   "Why does Ada leave the village?"
    answers    ("To look for her brother.", "Because her brother is missing.")         free-form
    documents  summaries: 3 to 11 parts of about 110 words; stories: 5 to 122 parts of about 220 words
    supporting ()
    kind       "summaries" or "stories"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvloom.errors import EvalError
from kvloom.eval.benchmark import Sample, benchmarks
from kvloom.eval.sources import PassageSet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@benchmarks.register("narrativeqa")
@dataclass(frozen=True, kw_only=True)
class NarrativeQA(PassageSet):
    """NarrativeQA's summaries, its stories, or the summaries and then the stories.

    LongBench has stories only: another part without a data folder is an ``EvalError``.
    """

    part: Literal["all", "summaries", "stories"] = "all"

    version = "1"
    is_multihop = False
    description = "questions on the plot of a story, from its summary or the whole text, free-form answers"
    licence = "Apache-2.0; summaries: Wikipedia, CC BY-SA 3.0; stories: public domain"
    file = "narrativeqa/narrativeqa"
    home = "https://github.com/google-deepmind/narrativeqa"
    longbench = "narrativeqa"

    def samples(self, data: Path | None) -> Iterator[Sample]:
        parts = ("summaries", "stories") if self.part == "all" else (self.part,)
        if data is None and self.part != "stories":
            raise EvalError(
                "narrativeqa: LongBench has the stories only; ask for part=stories, or name a data folder "
                "with --data or KVLOOM_DATA"
            )
        for part in parts:
            found = (
                self.from_hub("narrativeqa") if data is None else self.from_file(data, f"{self.file}_{part}")
            )
            for sample in found:
                yield replace(sample, kind=part)
