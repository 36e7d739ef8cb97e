"""HotpotQA (Yang et al., EMNLP 2018), distractor setting.

A sample::

    question   "Which of the two composers of ... was born first?"
    answers    ("Ada Example",)
    documents  10, title and paragraph; two are gold, eight share words with the question
    supporting (1, 7)
    kind       "bridge" (the second passage is found through the first) or "comparison"
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.sources import PassageSet


@benchmarks.register("hotpotqa")
@dataclass(frozen=True, kw_only=True)
class HotpotQA(PassageSet):
    """HotpotQA (Yang et al., EMNLP 2018), distractor setting."""

    version = "1"
    is_multihop = True
    description = "two-hop questions, ten Wikipedia passages of which two are needed"
    licence = "CC BY-SA 4.0"
    file = "hotpotqa/hotpotqa"
    home = "https://hotpotqa.github.io"
    longbench = "hotpotqa"
