"""Qasper (Dasigi et al., NAACL 2021).

A sample::

    question   "Which data sets do they train on?"
    answers    ("Example Corpus and its extension",)        free-form, often not in the text word for word
    documents  13 to 30 parts of one paper, in its order
    supporting ()
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.sources import PassageSet


@benchmarks.register("qasper")
@dataclass(frozen=True, kw_only=True)
class Qasper(PassageSet):
    """Qasper (Dasigi et al., NAACL 2021)."""

    version = "1"
    is_multihop = False
    description = "questions on one research paper, free-form answers"
    licence = "CC BY 4.0 (questions and text of the papers)"
    file = "qasper/qasper"
    home = "https://huggingface.co/datasets/allenai/qasper"
    longbench = "qasper"
