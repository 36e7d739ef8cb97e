"""What commands need before they can begin: documents, a selector, a model. The heavy imports are here."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom.cli.options import check_source, decode, store_url
from kvloom.cli.output import Activity, Remarks, remark
from kvloom.errors import MethodError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.compressors import Compressor
    from kvloom.documents import LoadReport
    from kvloom.loom import Loom
    from kvloom.prompt import Document
    from kvloom.selectors import Selector

MAX_MADE_QUESTIONS = 5


def configure() -> None:
    """Warnings of kvloom become remarks; those of the libraries below it, and their bars, are silent."""
    logger = logging.getLogger("kvloom")
    logger.handlers = [Remarks()]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logging.getLogger("kvloom.bundled").setLevel(logging.INFO)  # the one-time conversion, which takes a while
    logging.getLogger("kvloom.profile").setLevel(logging.INFO)  # layers that nobody named on the command line
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # memory profiling warns of what was there before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which tells when it starts and stops
    # Threads that spin while they wait make everything several times slower on a machine that has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def need_model(model: str | None) -> str:
    """The model named, or a sentence on how to name one; comes before anything heavy is imported."""
    if not model:
        raise MethodError(
            "no model is named; give one with -m or KVLOOM_MODEL, for example -m bundled:smollm2"
        )
    will_download = not model.startswith("bundled:") and not Path(model).expanduser().exists()
    if not (will_download and sys.stderr.isatty()):
        quiet_bars()
    return model


def quiet_bars() -> None:
    """The model's libraries show no bars of their own; they ask once, when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def load_source(source: str) -> tuple[list[Document], LoadReport]:
    """The documents of SOURCE, and an account of what was left out, each of which has been remarked on."""
    check_source(source)
    from kvloom.documents import load_with_report

    documents, report = load_with_report(source, skip_bad=True)
    for place, reason in report.skipped:
        remark(f"left out: {place} {reason}")
    return documents, report


def build_selector(name: str, options: list[str] | None) -> Selector:
    """The selector, options checked."""
    from kvloom.registry import parse_options

    parsed = parse_options(options or [])
    with Activity("starting"):
        from kvloom.selectors import selectors
    return selectors.build(name, parsed)


def fit_selector(loom: Loom, name: str, options: list[str] | None) -> Selector:
    """The selector, with the layers that the model's profile has for it."""
    from kvloom.profile import as_selector_for
    from kvloom.registry import parse_options

    return as_selector_for(loom.decoder, name, parse_options(options or []))


def check_sampling(sampling: dict[str, Any]) -> None:
    """Raises ``MethodError`` for sampling options out of range."""
    from kvloom.generate import Sampling

    Sampling(**sampling)


def pick(documents: Sequence[Document], question: str, top: int) -> list[Document]:
    """The `top` documents that the question is most likely about, in their own order."""
    if len(documents) <= top:
        return list(documents)
    from kvloom.retrieve import Retriever

    return [documents[place] for place in sorted(Retriever(documents).top(question, top))]


def build_compressor(text: str | None) -> Compressor | None:
    """The compressor of ``NAME`` or ``NAME:OPTION=VALUE,...``, for prompts and chunks."""
    if text is None:
        return None
    with Activity("starting"):
        from kvloom.eval.compressing import parse_rival
    return parse_rival(text).compressor


def open_loom(
    model: str,
    store: str | None,
    chunk_tokens: int,
    dtype: str | None,
    device: str | None,
    chunk_compressor: Compressor | None = None,
    *,
    namespace: str | None = None,
) -> Loom:
    """A Loom over the model and the store; what can be found wrong without loading the model comes first."""
    with Activity(f"loading {model}"):
        from kvloom.loom import Loom
        from kvloom.prompt import PromptFormat
        from kvloom.store import open_store

        format = PromptFormat(chunk_tokens=chunk_tokens)
        opened = open_store(store_url(store), namespace=namespace)
        check_device(device)
        return Loom.from_pretrained(
            model,
            store=opened,
            dtype=dtype,
            device=device,
            prompt_format=format,
            chunk_compressor=chunk_compressor,
        )


def check_device(device: str | None) -> None:
    """Raises ``MethodError`` for a device that torch cannot use here."""
    import torch

    if device == "meta":
        raise MethodError("device 'meta' holds no numbers; name one that computes, such as cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise MethodError(f"device {device!r} cannot be used here: {reason}") from None


def read_questions(given: Sequence[str] | None, file: Path | None) -> list[str]:
    """The questions of the command line and the file: one a line, or JSON lines with a "question"."""
    questions = [question.strip() for question in given or []]
    if any(not question for question in questions):
        raise PromptError("a question is empty; ask something")
    if file is None:
        return questions
    try:
        text = decode(file.read_bytes(), str(file))
    except OSError as error:
        raise PromptError(f"the questions in {file} cannot be read: {error.strerror}") from None
    lines = [(f"{file}:{number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    is_json = file.suffix.lower() == ".jsonl"
    found = [_question_of(place, line) if is_json else line.strip() for place, line in lines]
    if not found:
        raise PromptError(f"{file} holds no question; write one a line")
    return questions + found


def _question_of(place: str, line: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError:
        raise PromptError(f"{place} is not JSON") from None
    question = value.get("question") if isinstance(value, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise PromptError(f'{place} has no "question" that is text')
    return question.strip()


def made_questions(documents: Sequence[Document]) -> list[str]:
    """A question about each of up to five documents, evenly spread, for users who gave none."""
    number = min(MAX_MADE_QUESTIONS, len(documents))
    chosen = [documents[place * len(documents) // number] for place in range(number)]
    return [f"What does the text say about {_subject(document)}?" for document in chosen]


def _subject(document: Document) -> str:
    return document.title or " ".join(document.text.split()[:6]).rstrip(".,;:!?")
