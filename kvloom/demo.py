"""The demo: the whole job on the bundled model and the small corpus shipped beside this file.

Every question reads all passages, by three methods: full prefill, no recompute, and InfoFlow at 15 %. Times
are those of one process on one machine, the methods taking turns question by question, after a round that
does not count.
"""

from __future__ import annotations

import json
import re
import statistics
import string
from dataclasses import asdict, dataclass
from importlib.resources import files
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvloom.bundled import BUNDLED
from kvloom.generate import AnswerStream, Sampling
from kvloom.loom import Loom
from kvloom.paths import cache_folder
from kvloom.prompt import Document, Prompt
from kvloom.selectors import Full, InfoFlow, NoRecompute, Selector
from kvloom.trace import Answer, Trace
from kvloom.verify import kl_divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

METHODS: dict[str, Selector] = {
    "full prefill": Full(),
    "no recompute": NoRecompute(),
    "InfoFlow 15 %": InfoFlow(ratio=0.15),
}
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """A question about the corpus, its accepted answers, and the passages that hold them."""

    id: str
    question: str
    answers: list[str]
    passages: list[str]
    hops: int


@dataclass(frozen=True)
class Run:
    """One method's answer to one question."""

    label: str
    method: str  # the exact recipe
    answer: str
    is_right: bool  # holds an accepted answer, after normalization
    kl: float  # nats, KL(full prefill || this) of the first answer token
    seconds: dict[str, float]  # by stage, and "ttft"
    context_tokens: int
    reused_tokens: int
    recomputed_rows: int


@dataclass(frozen=True)
class Asked:
    """A question and all its runs."""

    question: str
    answers: list[str]
    hops: int
    runs: list[Run]


@dataclass(frozen=True)
class Summary:
    """One method over all questions."""

    label: str
    median_ttft_s: float
    median_ttft_ratio: float  # to full prefill of the same question
    mean_kl: float
    num_right: int
    num_questions: int


@dataclass(frozen=True)
class DemoReport:
    """Everything that the demo found."""

    model: str
    num_passages: int
    mean_context_tokens: float
    computed_chunks: list[str]  # ids of passages whose KV was computed now
    reused_chunks: list[str]  # ids of passages whose KV an earlier run had stored
    index_s: float
    questions: list[Asked]
    summary: list[Summary]
    footnote: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def corpus() -> tuple[list[Document], list[Question]]:
    """The passages and questions shipped with kvloom."""
    folder = files("kvloom") / "demo_corpus"
    passages, questions = (
        [
            json.loads(line)
            for line in (folder / name).read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        for name in ("passages.jsonl", "questions.jsonl")
    )
    return [Document(passage["text"], passage["id"], passage["title"]) for passage in passages], [
        Question(**question) for question in questions
    ]


def run(
    *,
    model: str = BUNDLED,
    num_questions: int | None = None,
    on_progress: Callable[[int, int], None],
    on_remark: Callable[[str], None],
    on_asked: Callable[[Asked], None],
) -> DemoReport:
    """Indexes the corpus into the demo's own store; answers the first `num_questions` questions, or all."""
    documents, questions = corpus()
    questions = questions[:num_questions]
    store = f"disk:{cache_folder() / 'demo'}"
    loom = Loom.from_pretrained(model, store=store)
    before = set(loom.store.keys())
    start = perf_counter()
    keys = loom.index(documents)
    index_s = perf_counter() - start
    ids = [str(document.id) for document in documents]  # one chunk each: the passages are short
    computed, reused = (
        [i for i, key in zip(ids, keys, strict=True) if (key in before) is was] for was in (False, True)
    )
    on_remark(_index_remark(computed, reused, index_s, store))
    for method in METHODS.values():
        _answer(loom, loom.prompt(questions[0].question, documents), method)
    on_remark("warmed up with the first question, not counted")
    asked = []
    for number, question in enumerate(questions):
        on_progress(number, len(questions))
        asked.append(_ask(loom, question, documents, turn=number))
        on_asked(asked[-1])
    on_progress(len(questions), len(questions))
    mean_tokens = statistics.mean(run.context_tokens for each in asked for run in each.runs)
    return DemoReport(
        model=model,
        num_passages=len(documents),
        mean_context_tokens=mean_tokens,
        computed_chunks=computed,
        reused_chunks=reused,
        index_s=index_s,
        questions=asked,
        summary=[_summarize(label, asked) for label in METHODS],
        footnote=_footnote(loom, model, len(documents), mean_tokens, num_questions, len(asked)),
    )


def _ask(loom: Loom, question: Question, documents: Sequence[Document], *, turn: int) -> Asked:
    """All methods on one question; which one is first changes from turn to turn."""
    prompt = loom.prompt(question.question, documents)
    labels = list(METHODS)
    first = turn % len(labels)
    results = {label: _answer(loom, prompt, METHODS[label]) for label in labels[first:] + labels[:first]}
    full_logits = results[labels[0]][1]
    runs = [_run(label, question, *results[label], full_logits) for label in labels]
    return Asked(question.question, question.answers, question.hops, runs)


def _answer(loom: Loom, prompt: Prompt, method: Selector) -> tuple[Answer, Tensor]:
    """The answer, and the logits (V,) of its first token."""
    trace = Trace()
    cache, logits = loom.prepare(prompt, method, reserve=MAX_NEW_TOKENS, trace=trace)
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
    stream = AnswerStream(loom.decoder, loom.tokenizer, cache, logits, sampling, trace)
    for _ in stream:
        pass
    return stream.answer, logits


def _run(label: str, question: Question, answer: Answer, logits: Tensor, full_logits: Tensor) -> Run:
    trace = answer.trace
    return Run(
        label=label,
        method=trace.method,
        answer=" ".join(answer.text.split()),
        is_right=is_right(answer.text, question.answers),
        kl=kl_divergence(full_logits, logits),
        seconds=trace.as_dict()["seconds"],
        context_tokens=trace.context_tokens,
        reused_tokens=trace.reused_tokens,
        recomputed_rows=trace.recomputed_rows,
    )


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether the answer holds an accepted one as whole words, case, articles and punctuation aside."""
    said = f" {_normalize(answer)} "
    return any(f" {_normalize(text)} " in said for text in accepted)


def _normalize(text: str) -> str:
    text = text.lower().translate(str.maketrans(dict.fromkeys(string.punctuation, " ")))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _summarize(label: str, asked: Sequence[Asked]) -> Summary:
    runs = [next(run for run in each.runs if run.label == label) for each in asked]
    ttft = [run.seconds["ttft"] for run in runs]
    full = [each.runs[0].seconds["ttft"] for each in asked]
    return Summary(
        label=label,
        median_ttft_s=statistics.median(ttft),
        median_ttft_ratio=statistics.median(a / b for a, b in zip(ttft, full, strict=True)),
        mean_kl=statistics.mean(run.kl for run in runs),
        num_right=sum(run.is_right for run in runs),
        num_questions=len(runs),
    )


def _index_remark(computed: Sequence[str], reused: Sequence[str], seconds: float, store: str) -> str:
    if not computed:
        return (
            f"all {len(reused)} passages were stored in {store} by an earlier run and are reused: "
            f"{', '.join(reused)}"
        )
    again = f"; {len(reused)} stored by an earlier run: {', '.join(reused)}" if reused else ""
    return f"{len(computed)} passages computed in {seconds:.1f} s and stored in {store}{again}"


def _footnote(
    loom: Loom, model: str, num_passages: int, tokens: float, num_questions: int | None, asked: int
) -> str:
    command = "kvloom demo" + ("" if num_questions is None else f" --questions {num_questions}")
    number = f"{asked} question{'s' * (asked != 1)}"
    return (
        f"{model} ({loom.decoder.num_layers} layers, {loom.decoder.dtype}, {loom.decoder.device}), "
        f"{num_passages} passages of the shipped corpus, {tokens:,.0f} context tokens, {number}, "
        f"greedy, at most {MAX_NEW_TOKENS} tokens. + means that the answer holds an accepted one; rows are "
        "those computed again; times are of one run, the methods taking turns, after one round that does not "
        f"count. Made by: {command}"
    )
