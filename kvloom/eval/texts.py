"""Texts to go on with: documents of a fixed number of tokens, that predictions over a cache are measured on.

prose  The books in ``haystack/*.txt`` of the data folder, cut at paragraphs into pieces that do not overlap;
       the first piece of a book (title, contents), its footnotes and their marks are left out. Books take
       turns, the pieces of each in an order drawn once.
gsm8k  Problems of ``gsm8k/gsm8k.jsonl`` with their worked answers, one after the other as in a few-shot
       prompt; the calculator's marks (``<<2+3=5>>``) are taken out. No problem is in two documents.

A document begins with the BOS token where the tokenizer has one.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch

import kvloom
from kvloom.errors import EvalError, MethodError
from kvloom.eval.benchmark import data_folder
from kvloom.eval.journal import versions
from kvloom.prompt import PromptFormat
from kvloom.registry import did_you_mean
from kvloom.turns import turn_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.loom import Loom

CHUNK = 128
"""Tokens of a continuation that are averaged into one number."""

NEAR = 256
"""The first tokens of a continuation; its second half is far."""

_PLAIN = PromptFormat(chat=False)


@dataclass(frozen=True, eq=False)
class TextDocument:
    """A document of exactly as many tokens as were asked for."""

    set: str
    id: str
    ids: Tensor  # (T,) int64


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """What decides the numbers of a run over continued texts. Raises ``MethodError`` for lengths that
    cannot be cut into chunks.
    """

    model: str
    sets: list[str]
    documents: int  # of each set
    prefix: int  # tokens
    continuation: int  # tokens
    fingerprint: str
    data: dict[str, str]  # digest of each set's documents
    kvloom_version: str = kvloom.__version__
    versions: dict[str, str] = field(default_factory=versions)


def check_lengths(prefix: int, continuation: int) -> None:
    """Raises ``MethodError`` for lengths that cannot be measured."""
    if prefix < 1:
        raise MethodError(f"prefix is a number of tokens and at least 1, got {prefix}")
    if continuation < NEAR or continuation % CHUNK:
        raise MethodError(
            f"continuation is a number of tokens, at least {NEAR} and a multiple of {CHUNK}, "
            f"got {continuation}"
        )


def num_tokens(prefix: int, continuation: int) -> int:
    """Tokens of a document: one more than is run, for the last prediction to be judged by."""
    return prefix + continuation + 1


def load_texts(
    loom: Loom, names: Sequence[str], data: str | Path | None, *, documents: int, length: int
) -> dict[str, list[TextDocument]]:
    """As many `documents` of each set, of `length` tokens each.

    Raises ``MethodError`` for an unknown set, ``EvalError`` where data is missing or too little, and where
    the model does not take so many tokens.
    """
    check_sets(names)
    folder = data_folder(data)
    if folder is None:
        raise EvalError("texts are read from a data folder; name one with --data or KVLOOM_DATA")
    limit = loom.decoder.max_length
    if limit is not None and length > limit:
        raise EvalError(f"documents of {length:,} tokens do not fit the model, which takes {limit:,}")
    found = {}
    for name in names:
        found[name] = list(islice(_SETS[name](loom, folder, length), documents))
        if len(found[name]) < documents:
            raise EvalError(
                f"{name} has {len(found[name])} documents of {length:,} tokens, {documents} are asked for; "
                "ask for fewer or shorter ones"
            )
    return found


def check_sets(names: Sequence[str]) -> None:
    """Raises ``MethodError`` for an unknown set of texts, or one named twice."""
    for name in names:
        if name not in _SETS:
            raise MethodError(f"unknown text set {name!r}{did_you_mean(name, _SETS)}")
    if len(set(names)) < len(names):
        raise MethodError(f"a text set is named twice: {', '.join(names)}")


def digest(documents: Iterable[TextDocument]) -> str:
    """SHA-256, in hex, over the ids and tokens of the documents, in order."""
    total = hashlib.sha256()
    for document in documents:
        total.update(json.dumps([document.id, document.ids.tolist()]).encode())
    return total.hexdigest()


# --- the sets


def _prose(loom: Loom, data: Path, length: int) -> Iterator[TextDocument]:
    paths = sorted((data / "haystack").glob("*.txt"))
    if not paths:
        raise EvalError(f"prose: {data / 'haystack'} holds no .txt file; put books there as plain text")
    books = [list(_pieces(loom, _paragraphs(path), "\n\n", length))[1:] for path in paths]
    for path, pieces in zip(paths, books, strict=True):
        random.Random(path.stem).shuffle(pieces)
    for turn in range(max(map(len, books))):
        for path, pieces in zip(paths, books, strict=True):
            if turn < len(pieces):
                number, ids = pieces[turn]
                yield TextDocument("prose", f"{path.stem}:{number}", ids)


def _paragraphs(path: Path) -> list[str]:
    found = [part.strip() for part in _read(path).split("\n\n")]
    return [re.sub(r"\[\d+\]", "", part) for part in found if part and not part.startswith("[Footnote")]


def _gsm8k(loom: Loom, data: Path, length: int) -> Iterator[TextDocument]:
    path = data / "gsm8k" / "gsm8k.jsonl"
    lines = [line for line in _read(path).splitlines() if line.strip()]
    try:
        texts = [_worked(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise EvalError(f"{path} has a line without question, worked_answer and answers: {error}") from None
    for number, ids in _pieces(loom, texts, "\n\n", length):
        yield TextDocument("gsm8k", f"gsm8k:{number}", ids)


def _worked(line: dict[str, object]) -> str:
    worked = re.sub(r"<<.*?>>", "", str(line["worked_answer"]))
    answer = list(line["answers"])[0]  # type: ignore[call-overload] # noqa: RUF015
    return f"Question: {line['question']}\nAnswer: {worked}\nThe answer is {answer}."


_SETS: dict[str, Callable[[Loom, Path, int], Iterator[TextDocument]]] = {"prose": _prose, "gsm8k": _gsm8k}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EvalError(f"{path} is not UTF-8 text") from None


def _pieces(loom: Loom, parts: Sequence[str], joint: str, length: int) -> Iterator[tuple[int, Tensor]]:
    """Numbered runs of parts of `length` tokens each, cut at its end; what is left over is dropped."""
    held: list[str] = []
    number = about = 0
    for part in parts:
        held.append(part)
        about += len(loom.tokenizer.encode(held[-1]))
        if about < length - 1:  # the joints, and a BOS, only add to it; it need not be exact
            continue
        ids = turn_ids(loom.tokenizer, _PLAIN, joint.join(held), is_first=True)
        if len(ids) >= length:
            yield number, torch.clone(ids[:length])
            held, about, number = [], 0, number + 1
