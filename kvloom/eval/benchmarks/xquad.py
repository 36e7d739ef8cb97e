"""XQuAD (Artetxe et al., ACL 2020), its English part: a subset of the dev set of SQuAD 1.1.

A sample::

    question   "How many bridges cross the river?"
    answers    ("seven",)                                  a span of the gold paragraph
    documents  5 paragraphs of the same article, one title
    supporting (0,)
    kind       "single-hop"
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.sources import PassageSet


@benchmarks.register("xquad")
@dataclass(frozen=True, kw_only=True)
class XQuAD(PassageSet):
    """XQuAD (Artetxe et al., ACL 2020), its English part: a subset of the dev set of SQuAD 1.1."""

    version = "1"
    is_multihop = False
    description = "single-hop questions over five paragraphs of one Wikipedia article"
    licence = "CC BY-SA 4.0"
    file = "xquad_en/xquad_en"
    home = "https://github.com/google-deepmind/xquad"
