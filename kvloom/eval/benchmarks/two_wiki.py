"""2WikiMultihopQA (Ho et al., COLING 2020), dev set.

A sample::

    question   "Where was the father of Ada Example born?"
    answers    ("Exampleton",)
    documents  10, title and paragraph; two to four are gold
    supporting (2, 8)
    kind       "compositional", "comparison", "bridge_comparison" or "inference"
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.sources import PassageSet


@benchmarks.register("2wikimultihopqa")
@dataclass(frozen=True, kw_only=True)
class TwoWikiMultihopQA(PassageSet):
    """2WikiMultihopQA (Ho et al., COLING 2020), dev set."""

    version = "1"
    is_multihop = True
    description = "multi-hop questions made from Wikidata relations, ten Wikipedia passages"
    licence = "Apache-2.0; passages: Wikipedia, CC BY-SA"
    file = "2wikimultihopqa/2wikimultihopqa"
    home = "https://github.com/Alab-NII/2wikimultihop"
    longbench = "2wikimqa"
