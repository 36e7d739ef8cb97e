"""Fidelity: how close predictions over compressed caches stay to those over the full cache, on texts.

Each document is a prefix, which is prefilled once and compressed by each method to each share of its tokens,
and a continuation, which is run over each cache. One JSON line for each document, method and share, and none
is measured twice.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvloom.compressors import Compressor, compress
from kvloom.errors import MethodError
from kvloom.eval.compressing import parse_rival
from kvloom.eval.continuations import Reference, distances, follow, fork, fork_observer
from kvloom.eval.journal import Journal
from kvloom.eval.texts import TextRecipe, digest
from kvloom.observe import Observer, Records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kvloom.eval.texts import TextDocument
    from kvloom.loom import Loom

KEEPS = (0.1, 0.2, 0.4, 0.6)
METHODS = ("infokv", "snapkv:kernel=9", "random", "streaming", "keydiff", "expected_attention")
"""InfoKV, its parent with the same window and pool, the control, and what looks at no query."""

KEY = ("set", "document", "method", "keep")


@dataclass(frozen=True, kw_only=True)
class FidelityRecipe(TextRecipe):
    """What decides a run's numbers."""

    methods: list[str]  # labels
    keeps: list[float]


@dataclass(frozen=True)
class Contender:
    """A method at one share of tokens."""

    label: str
    keep: float
    compressor: Compressor


def contenders(methods: Sequence[str], keeps: Sequence[float]) -> list[Contender]:
    """Every method at every share. Raises ``MethodError`` for a method that names its own share, and for one
    given twice.
    """
    for values, what in ((methods, "a method"), (keeps, "a share")):
        if len(set(values)) < len(values):
            raise MethodError(f"{what} is given twice: {', '.join(map(str, values))}")
    return [
        Contender(label, keep, parse_rival(label, {"keep": str(keep)}).compressor)
        for label in methods
        for keep in keeps
    ]


def make_recipe(
    loom: Loom,
    model: str,
    texts: Mapping[str, Sequence[TextDocument]],
    methods: Sequence[str],
    keeps: Sequence[float],
    *,
    prefix: int,
    continuation: int,
) -> FidelityRecipe:
    """The recipe of a run over the texts."""
    return FidelityRecipe(
        model=model,
        sets=list(texts),
        documents=max(map(len, texts.values())),
        prefix=prefix,
        continuation=continuation,
        fingerprint=loom.decoder.fingerprint,
        data={name: digest(documents) for name, documents in texts.items()},
        methods=list(methods),
        keeps=list(keeps),
    )


def run(
    loom: Loom,
    texts: Mapping[str, Sequence[TextDocument]],
    recipe: FidelityRecipe,
    folder: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Journal:
    """Fills the folder with what is not there yet; `on_progress(done, total)` counts results."""
    journal, every = Journal(folder, recipe, KEY), contenders(recipe.methods, recipe.keeps)
    documents = [document for found in texts.values() for document in found]
    total = len(documents) * len(every)
    for document in documents:
        missing = [c for c in every if (document.set, document.id, c.label, c.keep) not in journal.done]
        if not missing:
            continue
        for line in measure(loom, document, missing, recipe.prefix):
            journal.write(line)
            if on_progress is not None:
                on_progress(len(journal.done), total)
    return journal


def measure(
    loom: Loom, document: TextDocument, contenders: Sequence[Contender], prefix: int
) -> Iterator[dict[str, Any]]:
    """The result lines of one document; it is prefilled once for all that want no contrary records."""
    decoder = loom.decoder
    reference: Reference | None = None
    for records, members in together(contenders):
        cache = decoder.new_cache(prefix)
        observer = Observer(decoder, cache, records)
        observer.run(document.ids[:prefix])
        if reference is None:
            reference = follow(decoder, fork(decoder, cache), document.ids[prefix:])
        for member in members:
            copy = fork(decoder, cache)
            start = time.perf_counter()
            done = compress(member.compressor, copy, fork_observer(observer, copy))
            decoder.synchronize()
            seconds = time.perf_counter() - start
            yield {
                "set": document.set,
                "document": document.id,
                "method": member.label,
                "keep": member.keep,
                "name": member.compressor.name,
                "recipe": done.method,
                "options": asdict(member.compressor),
                "kept": done.kept,
                "bytes": done.bytes_after,
                "full_bytes": done.bytes_before,
                "compress_s": seconds,
                "note": done.note,
                "full_nll": reference.nll,
                **asdict(distances(decoder, copy, reference)),
            }


def together(contenders: Sequence[Contender]) -> list[tuple[Records, list[Contender]]]:
    """The contenders in groups that one prefill can serve, with what it is to record."""
    groups: list[tuple[Records, list[Contender]]] = []
    for contender in contenders:
        wanted = contender.compressor.records
        for place, (records, members) in enumerate(groups):
            try:
                joint = records | wanted
            except MethodError:  # another kind of entropy or drift
                continue
            groups[place] = joint, [*members, contender]
            break
        else:
            groups.append((wanted, [contender]))
    return groups
