"""MuSiQue-Ans (Trivedi et al., TACL 2022).

A sample::

    question   "Who led the country in which the builder of ... was born?"
    answers    ("Ada Example", "A. Example")               aliases count as well
    documents  20, title and paragraph; one gold paragraph for each hop
    supporting (5, 17)
    kind       "2hop", "3hop1", "3hop2", "4hop1", ...       hops, and the shape of the chain
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.sources import PassageSet


@benchmarks.register("musique")
@dataclass(frozen=True, kw_only=True)
class MuSiQue(PassageSet):
    """MuSiQue-Ans (Trivedi et al., TACL 2022)."""

    version = "1"
    is_multihop = True
    description = "two- to four-hop questions over twenty Wikipedia paragraphs"
    licence = "CC BY 4.0; passages: Wikipedia, CC BY-SA"
    file = "musique/musique"
    home = "https://github.com/StonyBrookNLP/musique"
    longbench = "musique"
