"""Solve: answers that are compressed while they grow, against the same over a cache that keeps everything.

Two looks at each task, as far as it allows them:

reference  A right answer, written out, is run teacher-forced, while the decode compressor drops rows of it
           at its interval: log-likelihood, and KL to the full cache's predictions.
generated  The greedy answer, judged: the last number, the letter, the instructions followed.

Where an answer ends before the interval nothing is dropped, and both looks say so. One JSON line for each
task, method and share.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

import kvloom
from kvloom.compressors import Compressor, Growing
from kvloom.conversation import Conversation
from kvloom.errors import EvalError, MethodError
from kvloom.eval import metrics
from kvloom.eval.compressing import parse_rival
from kvloom.eval.instructions import follows
from kvloom.eval.journal import versions
from kvloom.eval.runner import Run
from kvloom.eval.task import digest, last_letter, last_number
from kvloom.long_answer import generate
from kvloom.trace import Trace
from kvloom.turns import turn_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.eval.task import Task, TaskSet
    from kvloom.loom import Loom

KEEPS = (0.25,)
METHODS = ("infokv", "rpc", "r-kv", "random", "streaming")
FULL = "full"
KEY = ("benchmark", "sample", "method", "keep")


@dataclass(frozen=True, kw_only=True)
class SolveRecipe:
    """All that decides the numbers of a run, timings aside."""

    model: str
    sets: list[str]  # repr of each
    limit: int | None
    prompt_method: str | None  # label
    decode_methods: list[str]  # labels
    keeps: list[float]
    every: int
    recent: int
    max_new_tokens: int  # of greedy answers; 0: none are generated
    fingerprint: str
    data: dict[str, str]  # digest of each set's tasks
    kvloom_version: str = kvloom.__version__
    versions: dict[str, str] = field(default_factory=versions)


@dataclass(frozen=True)
class Arm:
    """What compresses prompt and answer; `keep` is the share of the answer."""

    label: str
    keep: float
    prompt: Compressor | None = None
    decode: Growing | None = None


def arms(
    methods: Sequence[str], keeps: Sequence[float], every: int, recent: int, prompt_method: str | None = None
) -> list[Arm]:
    """The full cache, the compressed prompt alone, and every method at every share.

    Raises ``MethodError`` for a method that names its own share or schedule, and for one given twice.
    """
    for values, what in ((methods, "a method"), (keeps, "a share")):
        if len(set(values)) < len(values):
            raise MethodError(f"{what} is given twice: {', '.join(map(str, values))}")
    found = [Arm(FULL, 1.0)]
    prompt = None
    if prompt_method is not None:
        prompt = parse_rival(prompt_method).compressor
        found.append(Arm(prompt_method, 1.0, prompt))
    for label in methods:
        for keep in keeps:
            shared = {"keep": str(keep), "every": str(every), "recent": str(recent)}
            decode = parse_rival(label, shared, phase="decode").compressor
            if not isinstance(decode, Growing):
                raise MethodError(f"{decode.name} has no interval; derive it from Growing")
            found.append(Arm(label, keep, prompt, decode))
    return found


def make_recipe(
    loom: Loom, model: str, sets: Sequence[TaskSet], tasks: Sequence[Sequence[Task]], **asked: Any
) -> SolveRecipe:
    """The recipe of a run over tasks taken from the sets; `asked` are its other fields."""
    return SolveRecipe(
        model=model,
        sets=[repr(task_set) for task_set in sets],
        fingerprint=loom.decoder.fingerprint,
        data={s.name: digest(taken) for s, taken in zip(sets, tasks, strict=True)},
        **asked,
    )


def run(
    loom: Loom,
    sets: Sequence[TaskSet],
    tasks: Sequence[Sequence[Task]],
    recipe: SolveRecipe,
    folder: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Fills the folder with what is not there yet; `on_progress(done, total)` counts results.

    Raises ``EvalError`` when no task fits the model.
    """
    journal = Run(folder, recipe, KEY)
    every = arms(
        recipe.decode_methods, recipe.keeps, recipe.every, recipe.recent, prompt_method=recipe.prompt_method
    )
    pairs = [(task_set, task) for task_set, taken in zip(sets, tasks, strict=True) for task in taken]
    for task_set, task in pairs:
        missing = [arm for arm in every if (task_set.name, task.id, arm.label, arm.keep) not in journal.done]
        if not missing or (task_set.name, task.id) in journal.skipped:
            continue
        asked = _Asked.of(loom, task_set, task, recipe.max_new_tokens)
        limit = loom.decoder.max_length
        if limit is not None and asked.num_tokens > limit:
            reason = f"prompt and answer may have {asked.num_tokens:,} tokens, the model takes {limit:,}"
            journal.skip(task_set.name, task.id, reason)
            continue
        for line in measure(loom, asked, missing):
            journal.write({"benchmark": task_set.name, "sample": task.id, "judge": task_set.judge, **line})
            if on_progress is not None:
                on_progress(len(journal.done), len(pairs) * len(every))
    if not journal.done:
        raise EvalError(f"none of {len(pairs)} tasks fits the model's context; nothing was measured")
    return journal


@dataclass(frozen=True, eq=False)
class _Asked:
    """A task as tokens."""

    task: Task
    ids: Tensor  # (T,)
    reference: Tensor  # (A,), empty where there is none
    max_new_tokens: int  # 0: no answer is generated
    judge: str

    @classmethod
    def of(cls, loom: Loom, task_set: TaskSet, task: Task, max_new_tokens: int) -> _Asked:
        chat = replace(loom.prompt_format, chat=loom.prompt_format.chat and task.is_chat)
        ids = turn_ids(loom.tokenizer, chat, task.prompt, is_first=True)
        reference = loom.tokenizer.encode(task.reference) if task.reference else []
        wanted = 0 if task_set.judge == "none" else max_new_tokens
        return cls(task, ids, torch.tensor(reference, dtype=torch.int64), wanted, task_set.judge)

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + max(len(self.reference), self.max_new_tokens)


def measure(loom: Loom, asked: _Asked, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
    """The result lines of one task."""
    full = None
    if len(asked.reference):
        full, _ = _forced(loom, asked, Arm(FULL, 1.0))
    for arm in arms:
        line: dict[str, Any] = {
            "method": arm.label,
            "keep": arm.keep,
            "name": "" if arm.decode is None else arm.decode.name,
            "recipe": repr(arm.decode),
            "prompt_recipe": repr(arm.prompt),
            "options": {} if arm.decode is None else asdict(arm.decode),
            "prompt_tokens": len(asked.ids),
        }
        if full is not None:
            line["reference"] = _reference(loom, asked, arm, full)
        if asked.max_new_tokens:
            line["generated"] = _generated(loom, asked, arm)
        yield line


def _forced(loom: Loom, asked: _Asked, arm: Arm) -> tuple[Tensor, Conversation]:
    """(A, V) float32 logits that predict each reference token, and where they were run."""
    talk = Conversation(
        loom.decoder, compressor=arm.prompt, decode_compressor=arm.decode, capacity=asked.num_tokens
    )
    first = talk.prefill(asked.ids)[None]
    talk.compress()
    given = asked.reference[:-1]
    return torch.cat([first, talk.follow(given)]) if len(given) else first, talk


def _reference(loom: Loom, asked: _Asked, arm: Arm, full: Tensor) -> dict[str, Any]:
    logits, talk = _forced(loom, asked, arm)
    trace = Trace()
    talk.end(asked.reference.tolist(), trace)
    target = asked.reference.to(logits.device)
    kl = metrics.kl_per_token(full, logits)
    return {
        "tokens": len(asked.reference),
        "kl": float(kl.mean()),
        "nll": float(metrics.nll_per_token(logits, target).mean()),
        "full_nll": float(metrics.nll_per_token(full, target).mean()),
        "agreement": metrics.agreement(full, logits),
        **_cost(loom, talk, trace.compressions),
    }


def _generated(loom: Loom, asked: _Asked, arm: Arm) -> dict[str, Any]:
    answer = generate(
        loom,
        asked.ids,
        compressor=arm.prompt,
        decode_compressor=arm.decode,
        max_new_tokens=asked.max_new_tokens,
    ).finish()
    compressed = answer.trace.compressions
    if arm.prompt is not None and arm.prompt.keep < 1:
        compressed = compressed[1:]
    return {
        "text": answer.text,
        "tokens": answer.trace.new_tokens,
        "finish_reason": answer.trace.finish_reason,
        "decode_s": answer.trace.seconds.decode,
        **_cost(loom, answer.continuation, compressed),
        **judged(asked.task, asked.judge, answer.text),
    }


def _cost(loom: Loom, talk: Conversation, compressed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often rows of the answer were dropped, and what the cache holds at its end."""
    cache = talk.cache
    row_bytes = sum(
        shape.num_heads * (shape.key_dim + shape.value_dim) * loom.decoder.dtype.itemsize
        for shape in loom.decoder.kv_shapes
    )
    return {
        "compressions": sum(done["kept"] != done["held"] for done in compressed),
        "bytes": cache.num_bytes,
        "full_bytes": cache.num_rows * row_bytes,
        "kept": [layer.length for layer in cache.layers],
    }


def judged(task: Task, judge: str, text: str) -> dict[str, Any]:
    """The marks of an answer; for instructions a list of id and true, false, or null where it cannot be
    told.
    """
    if judge == "number":
        return {"correct": float(last_number(text) == task.answer)}
    if judge == "letter":
        return {"correct": float(last_letter(text) == task.answer)}
    if judge == "instructions":
        found = [[name, follows(name, arguments, text)] for name, arguments in task.instructions]
        return {"instructions": found}
    return {}
