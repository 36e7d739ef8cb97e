"""Documents by name, from text to chunks in the store: only what changed is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.errors import DocumentError, StoreError
from kvloom.prompt import as_document
from kvloom.prompt import chunks as cut_into_chunks
from kvloom.store.documents import Change, content_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvloom.loom import Loom
    from kvloom.prompt import Document
    from kvloom.store.documents import Documents

TOGETHER = 32  # documents whose chunks are computed in one go, before they are recorded


@dataclass(frozen=True, kw_only=True)
class IndexedDocument:
    """A document that was indexed, and what that changed in the store."""

    id: str
    keys: tuple[str, ...]
    change: Change
    is_new: bool  # there was no document of this id


def index_documents(
    loom: Loom,
    documents: Sequence[Document],
    *,
    source: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> list[IndexedDocument]:
    """Each document's chunks are stored, and the store's documents say so; those of the same id are replaced.

    A document is recorded once its chunks are stored, so an interrupted run has lost none that was.
    `on_progress(done, total)` counts documents. Raises ``DocumentError`` for one without an id, or with that
    of another, and ``StoreError`` for a store that keeps no documents.
    """
    stored = loom.store.documents  # a store that keeps none says so before any work
    documents = [as_document(document) for document in documents]
    seen: set[str] = set()
    for place, document in enumerate(documents):
        if not document.id:
            raise DocumentError(f"document {place} has no id; give it one, as in Document(text, id='report')")
        if document.id in seen:
            raise DocumentError(f"two documents have the id {document.id!r}; give each its own")
        seen.add(document.id)
    indexed: list[IndexedDocument] = []
    for first in range(0, len(documents), TOGETHER):
        together = documents[first : first + TOGETHER]
        for document, keys in zip(together, _store_chunks(loom, together), strict=True):
            indexed.append(_record(loom, stored, document, keys, source))
            if on_progress is not None:
                on_progress(len(indexed), len(documents))
    return indexed


def _store_chunks(loom: Loom, documents: Sequence[Document]) -> list[list[str]]:
    """The keys of each document's chunks, which are all stored."""
    keys = iter(loom.index(documents))
    found: list[list[str]] = [[] for _ in documents]
    for chunk in cut_into_chunks(loom.tokenizer, loom.prompt_format, documents):
        found[chunk.document].append(next(keys))
    return found


def _record(
    loom: Loom, stored: Documents, document: Document, keys: Sequence[str], source: str
) -> IndexedDocument:
    id, hash = str(document.id), content_hash(document.text, document.title)
    is_new = stored.get(id) is None
    change = stored.record(id, keys, source=source, content_hash=hash)
    if change.missing:  # another process freed or evicted some before they were this document's
        _store_chunks(loom, [document])
        gone = [key for key in change.missing if key not in loom.store]
        if gone:
            raise StoreError(
                f"{loom.store.where} does not keep the {len(keys)} chunks of document {id!r}; "
                "raise its quota or its memory"
            )
    return IndexedDocument(id=id, keys=tuple(keys), change=change, is_new=is_new)
