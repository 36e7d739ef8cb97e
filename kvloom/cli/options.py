"""The arguments and options that commands share, and the checks that need nothing heavy.

No ``from __future__ import annotations`` in files with commands: Typer reads these types at run time.
"""

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvloom.errors import DocumentError, MethodError, PromptError
from kvloom.paths import cache_folder


class Dtype(StrEnum):
    """The number formats that a model can be loaded in; ``auto`` is the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


# Groups have this instead of Typer's own help option, which imports pydantic even when not given.
GroupHelp = Annotated[bool, typer.Option("-h", "--help", help="Show this message and exit.")]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Folder, .txt .md .jsonl or .json file, or - for stdin.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="KVLOOM_MODEL",
        help="Model folder, hub name, or bundled:smollm2.",
        show_default=False,
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="KVLOOM_STORE",
        help="Where KV is kept, such as disk:PATH or, in quotes, 'disk:PATH?codec=int8&quota=200GiB'; by "
        "default a folder in the user's cache folder.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="The tenant whose part of the store is used; no other sees it.",
        show_default=False,
    ),
]
ChunkTokens = Annotated[
    int,
    typer.Option("--chunk-tokens", metavar="N", help="Longer documents are split; part of what is stored."),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype", help="By default float32 on a CPU, else the checkpoint's own.", show_default=False
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEV", help="Such as cpu or cuda:0; by default the CPU.", show_default=False
    ),
]
SelectorName = Annotated[
    str,
    typer.Option("--selector", "-s", metavar="NAME", help="Which rows are recomputed; see kvloom methods."),
]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Option of the selector, such as ratio=0.15; repeatable.",
        show_default=False,
    ),
]
ChunkCompressor = Annotated[
    str | None,
    typer.Option(
        "--chunk-compressor",
        metavar="NAME[:OPTION=VALUE,...]",
        help="Stored chunks keep only what this compressor keeps of them; see kvloom methods.",
        show_default=False,
    ),
]
Top = Annotated[
    int, typer.Option("--top", min=1, metavar="N", help="With more documents than this, BM25 picks.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def store_url(url: str | None, *, shared: bool = False) -> str:
    """The store's URL; with `shared`, one that outlives this process, or ``MethodError``."""
    url = url or f"disk:{cache_folder() / 'store'}"
    if shared and all(tier.startswith("memory:") for tier in re.split(",(?=[a-z]+:)", url)):
        raise MethodError(
            f"store {url!r} lives and ends with one process; name one that lasts, such as disk:PATH"
        )
    return url


def check_source(source: str) -> None:
    """Raises ``DocumentError`` for a path that is not there, long before anything is loaded."""
    if source != "-" and not Path(source).exists():
        raise DocumentError(f"{source} does not exist; give a file, a folder, or - for standard input")


def read_question(question: str, source: str) -> str:
    """The question, from standard input when it is ``-``; raises ``PromptError`` when it is empty."""
    if question == "-":
        if source == "-":
            raise MethodError(
                "question and documents cannot both come from standard input; write one of them out"
            )
        question = decode(sys.stdin.buffer.read(), "the question on standard input")
    if not question.strip():
        raise PromptError("the question is empty; ask something")
    return question.strip()


def decode(raw: bytes, what: str) -> str:
    """UTF-8 text, or ``PromptError``."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise PromptError(f"{what} is not UTF-8 text") from None
