"""Benchmark: a set of samples in a fixed order. Each is one file in `kvloom.eval.benchmarks`.

The data lies in a folder, given or named by ``$KVLOOM_DATA``; without a folder, sets that LongBench has are
read from the Hugging Face hub. A folder that lacks a set's file is an error, never a reason to look
elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvloom.errors import EvalError
from kvloom.eval.passages import join_passages
from kvloom.prompt import Document
from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Sample:
    """A question, the documents to answer it from, and the answers that count.

    Raises ``EvalError`` where there is no question, answer or document, or a gold passage that is not there.
    """

    id: str
    question: str
    answers: tuple[str, ...]  # the first is the main one
    documents: tuple[Document, ...]
    supporting: tuple[int, ...] = ()  # positions in `documents` of the gold passages; empty if unknown
    kind: str = ""  # hops, bridge or comparison, part of the set, ...; empty if unknown

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise EvalError(f"sample {self.id!r} has no question")
        if not any(answer.strip() for answer in self.answers):
            raise EvalError(f"sample {self.id!r} has no answer")
        if not self.documents:
            raise EvalError(f"sample {self.id!r} has no passages")
        for place, document in enumerate(self.documents):
            if not document.text.strip():
                raise EvalError(f"sample {self.id!r}: passage {place} is empty")
        for place in self.supporting:
            if not 0 <= place < len(self.documents):
                raise EvalError(
                    f"sample {self.id!r}: supporting names passage {place}, there are {len(self.documents)}"
                )


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """Base of all sets. Options are fields, so ``repr(benchmark)`` says which samples were asked for."""

    name: ClassVar[str]
    version: ClassVar[str]  # another one when samples, their order or their text change
    is_multihop: ClassVar[bool]
    metric: ClassVar[str] = "token_f1"  # the function in `kvloom.eval.metrics` that judges an answer
    description: ClassVar[str]
    licence: ClassVar[str]  # of the data

    @abstractmethod
    def samples(self, data: Path | None) -> Iterator[Sample]:
        """All samples, in the same order each time; `data` is the data folder, None where there is none.

        Raises ``EvalError``, at the latest when iterated, for data that is not there or cannot be read.
        """


benchmarks: Registry[Benchmark] = Registry("benchmark", "kvloom.eval.benchmarks")


def build(name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Benchmark:
    """The set `name` with `options`; `seed` is for those that draw their samples (`needle`).

    Raises ``MethodError`` for an unknown name or option.
    """
    fields = {field.name for field in dataclasses.fields(benchmarks[name])}
    drawn = {"seed": seed} if "seed" in fields else {}
    return benchmarks.build(name, {**drawn, **(options or {})})


def load(
    name: str,
    data: str | Path | None = None,
    limit: int | None = None,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """The first `limit` samples of the set `name`, or all. Raises as `build` and `take` do."""
    return take(build(name, options, seed=seed), data, limit)


def take(benchmark: Benchmark, data: str | Path | None = None, limit: int | None = None) -> list[Sample]:
    """The first `limit` samples of `benchmark`, or all, read from the folder `data` or ``$KVLOOM_DATA``.

    Raises ``EvalError`` for a limit below 1, data that is missing or broken, an id that comes twice, and a
    set without samples.
    """
    if limit is not None and limit < 1:
        raise EvalError(f"limit is a number of samples and at least 1, got {limit}")
    samples = list(islice(benchmark.samples(data_folder(data)), limit))
    if not samples:
        raise EvalError(f"{benchmark.name} has no samples; look at its data file and options")
    seen: set[str] = set()
    for sample in samples:
        if sample.id in seen:
            raise EvalError(f"{benchmark.name}: the id {sample.id!r} stands twice in the data")
        seen.add(sample.id)
    return samples


def find(samples: Sequence[Sample], wanted: str) -> Sample:
    """The sample of the id `wanted`, else the one of that number, counted from 1; ``EvalError`` for none."""
    for sample in samples:
        if sample.id == wanted:
            return sample
    if wanted.isdecimal() and 1 <= int(wanted) <= len(samples):
        return samples[int(wanted) - 1]
    raise EvalError(
        f"there is no sample {wanted!r}; give an id such as {samples[0].id!r}, or a number from 1 to "
        f"{len(samples):,}"
    )


def data_folder(data: str | Path | None = None) -> Path | None:
    """`data`, else ``$KVLOOM_DATA``, else None; raises ``EvalError`` for a folder that is not there."""
    named = data if data is not None else os.environ.get("KVLOOM_DATA") or None
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        source = "--data" if data is not None else "KVLOOM_DATA"
        raise EvalError(
            f"the data folder {str(named)!r} ({source}) does not exist; name one that holds a folder per set "
            "such as hotpotqa/hotpotqa.jsonl, or name none to read LongBench from the Hugging Face hub"
        )
    return folder


def as_passages(sample: Sample) -> tuple[Document, ...]:
    """The documents as the set has them, one chunk for each."""
    return sample.documents


def joined(sample: Sample) -> Document:
    """All documents as one text in LongBench's layout, to be cut into chunks of a fixed number of tokens."""
    return Document(join_passages(sample.documents), id=sample.id)


def digest(samples: Iterable[Sample]) -> str:
    """SHA-256, in hex, over all that the samples hold, in order: equal for equal data wherever it lies."""
    total = hashlib.sha256()
    for sample in samples:
        total.update(json.dumps(asdict(sample), sort_keys=True).encode() + b"\n")
    return total.hexdigest()
