"""What ``kvloom index``, ``store add`` and ``store reindex`` share: the work, and what is told of it."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvloom.cli.failures import INTERRUPTED, fail
from kvloom.cli.output import Activity, count, echo_json, remark, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvloom.documents import LoadReport
    from kvloom.indexing import IndexedDocument
    from kvloom.loom import Loom
    from kvloom.prompt import Document
    from kvloom.store import Store


@dataclass
class Work:
    """Documents that were indexed, and those that could not be."""

    indexed: list[IndexedDocument] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def number(self, status: str) -> int:
        return sum(document.status == status for document in self.indexed)


def origin(source: str) -> str:
    """The path that is recorded with documents of SOURCE; empty for standard input."""
    return "" if source == "-" else str(Path(source).absolute())


def index(loom: Loom, sources: Mapping[str, Sequence[Document]]) -> Work:
    """The documents of each source are stored and recorded; Ctrl-C ends the process with how far that was."""
    from kvloom.indexing import index_documents

    work, start = Work(), time.perf_counter()
    with Activity("indexing (tokens)") as activity:
        try:
            for source, documents in sources.items():
                if documents:
                    work.indexed += index_documents(
                        loom, documents, source=source, on_progress=activity.update
                    )
            loom.store.flush()
        except KeyboardInterrupt:
            fail(_interrupted(activity.done, activity.total), INTERRUPTED)
    work.seconds = time.perf_counter() - start
    _remark_on(work, loom.store)
    return work


def index_with_ray(
    model: str,
    documents: Sequence[Document],
    store: str,
    source: str,
    chunk_tokens: int,
    options: Mapping[str, Any],
) -> Work:
    """The same by the workers of a Ray cluster; for `options` see `kvloom.ray_indexing`."""
    with Activity("starting"):
        from kvloom import ray_indexing
        from kvloom.prompt import PromptFormat
        from kvloom.store import open_store

    start = time.perf_counter()
    # Ray prints on stdout what the cluster says of dead workers, which the report says too.
    with Activity("indexing (documents)") as activity, contextlib.redirect_stdout(io.StringIO()):
        try:
            report = ray_indexing.index_with_ray(
                model,
                documents,
                store=store,
                source=source,
                prompt_format=PromptFormat(chunk_tokens=chunk_tokens),
                on_progress=activity.update,
                **options,
            )
        except KeyboardInterrupt:
            indexed = f"{activity.done:,} of {count(len(documents), 'document')} are indexed"
            fail(f"interrupted: {indexed}; run the same command again to continue", INTERRUPTED)
    work = Work(report.indexed, [asdict(failure) for failure in report.failed], time.perf_counter() - start)
    _remark_on(work, open_store(store, namespace=options.get("namespace")))
    return work


def _interrupted(done: int, total: int) -> str:
    stored = (
        f"{done:,} of {count(total, 'token')} to compute are stored" if total else "nothing was computed yet"
    )
    return f"interrupted: {stored}; run the same command again to continue"


def _remark_on(work: Work, store: Store) -> None:
    """Says what one may not have wanted."""
    taken = [
        (document.id, document.before.source)
        for document in work.indexed
        if document.status == "replaced"
        and document.before is not None
        and document.before.source not in ("", document.source)
    ]
    if taken:
        id, source = taken[0]
        remark(f"{count(len(taken), 'document')} of another source had the same id, such as {id} of {source}")
    if work.number("unnamed"):
        remark(f"{store.where} keeps no documents: the chunks are stored, but not under the documents' ids")


def echo_documents(work: Work, *, json: bool) -> None:
    """What happened to each document."""
    if json:
        rows = [
            {
                "id": document.id,
                "is_new": document.status == "new",
                "status": document.status,
                "keys": list(document.keys),
                **{name: list(keys) for name, keys in asdict(document.change).items() if name != "missing"},
            }
            for document in work.indexed
        ]
        echo_json({"documents": rows})
        return
    chunks = len({key for document in work.indexed for key in document.change.new})
    freed = sum(len(document.change.freed) for document in work.indexed)
    typer.echo(
        f"{count(len(work.indexed), 'document')}: {work.number('new'):,} new, "
        f"{work.number('replaced'):,} replaced, {work.number('unchanged'):,} unchanged; "
        f"{count(chunks, 'chunk')} new, {freed:,} freed"
    )


def echo_chunks(work: Work, report: LoadReport, store: Store, *, json: bool) -> None:
    """What the store holds now, and what that took."""
    summary = _summary(work, report, store)
    if json:
        echo_json(summary)
        return
    speed = summary["tokens_per_second"]
    pace = f", {speed:,.0f} tokens/s" if speed else ""
    statuses = ", ".join(f"{work.number(status):,} {status}" for status in ("new", "replaced", "unchanged"))
    typer.echo(
        f"{count(summary['documents'], 'document')} ({statuses}), {count(summary['chunks'], 'chunk')}, "
        f"{count(summary['tokens'], 'token')}: {summary['new']:,} new, "
        f"{summary['already_stored']:,} already stored, {count(summary['duplicates'], 'duplicate')}, "
        f"{len(summary['skipped']):,} left out"
    )
    typer.echo(f"{summary['seconds']:.1f} s{pace}")
    held = "" if summary["store_bytes"] is None else f", {size(summary['store_bytes'])}"
    typer.echo(f"{summary['store']} holds {summary['store_entries']:,} entries (chunks, headers){held}")
    for failure in work.failed:
        remark(f"not indexed: {failure['id']}, tried {failure['attempts']} times: {failure['cause']}")


def _summary(work: Work, report: LoadReport, store: Store) -> dict[str, Any]:
    keys = [key for document in work.indexed for key in document.keys]
    unique = set(keys)
    new = {key for document in work.indexed for key in document.computed}
    computed_tokens = sum(document.computed_tokens for document in work.indexed)
    held = store.stats()
    return {
        "documents": len(work.indexed),
        "documents_new": work.number("new"),
        "documents_replaced": work.number("replaced"),
        "documents_unchanged": work.number("unchanged"),
        "failed": work.failed,
        "chunks": len(unique),
        "tokens": sum(document.num_tokens for document in work.indexed),
        "new": len(new),
        "already_stored": len(unique - new),
        "duplicates": report.num_duplicates + len(keys) - len(unique),
        "skipped": [{"place": place, "reason": reason} for place, reason in report.skipped],
        "other_files": report.num_other,
        "seconds": work.seconds,
        "computed_tokens": computed_tokens,
        "tokens_per_second": computed_tokens / work.seconds if computed_tokens else None,
        "store": held.where,
        "store_entries": held.entries,
        "store_bytes": held.num_bytes,
    }
