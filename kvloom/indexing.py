"""Documents -> chunks -> store, and who the chunks belong to: only what changed is computed.

A document with an id is recorded in a store that keeps documents. One that was recorded with the same text,
title and recipe, and whose chunks are all there, is not even tokenized again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvloom.errors import DocumentError, StoreError
from kvloom.prompt import CUTTING, as_documents
from kvloom.prompt import chunks as cut_into_chunks
from kvloom.store.base import fields
from kvloom.store.documents import Change, check_id, content_hash, documents_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from kvloom.loom import Loom
    from kvloom.prompt import Document
    from kvloom.store.documents import Documents, StoredDocument

GROUP_TOKENS = 16_384  # computed in one go before documents are recorded: many forwards, all but one full
GROUP_DOCUMENTS = 256


@dataclass(frozen=True, kw_only=True)
class IndexedDocument:
    """A document whose chunks are stored, and what that changed in the store."""

    id: str | None
    keys: tuple[str, ...]  # of its chunks, in order
    num_tokens: int
    source: str = ""  # the path it was read from
    computed: tuple[str, ...] = ()  # chunks that were not in the store
    computed_tokens: int = 0  # of these
    is_recorded: bool = False  # by its id; False: it has none, or the store keeps no documents
    before: StoredDocument | None = None  # what was recorded under the id
    change: Change = field(default_factory=Change)

    @property
    def status(self) -> str:
        """``new``, ``replaced``, ``unchanged``, or ``unnamed``: not recorded."""
        if not self.is_recorded:
            return "unnamed"
        if self.before is None:
            return "new"
        return "unchanged" if self.keys == self.before.keys else "replaced"


def index_documents(
    loom: Loom,
    documents: Iterable[Document | str],
    *,
    source: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> list[IndexedDocument]:
    """Every chunk of the documents is stored, and documents with an id are recorded in place of those of the
    same id; what these had and no other document has is freed.

    `source` is the path they were read from. `on_progress(done, total)` counts the tokens to compute. A
    document is recorded once its chunks are stored, so an interrupted run has lost none that was. Raises
    ``DocumentError`` for different documents of one id, ``ContextTooLong`` for a chunk that the model cannot
    take, both before any work, and ``StoreError`` when the store cannot be written.
    """
    given = as_documents(documents)
    check_ids(given)
    return _Run(loom, given, source).index(on_progress)


def check_ids(documents: Sequence[Document]) -> None:
    """Raises ``DocumentError`` for an id that is no line of text, or that different documents have."""
    seen: dict[str, Document] = {}
    for document in documents:
        if document.id is not None:
            check_id(document.id)
            if seen.setdefault(document.id, document) != document:
                raise DocumentError(f"two documents have the id {document.id!r}; give each its own")


def recipe(loom: Loom) -> str:
    """SHA-256 (hex) of all that chunks follow from besides title and text."""
    compressor = "" if loom.chunk_compressor is None else repr(loom.chunk_compressor)
    header = loom.prefill_header().numpy().astype("<i8").tobytes()
    parts = [loom.decoder.fingerprint, str(CUTTING), str(loom.prompt_format.chunk_tokens), compressor]
    return hashlib.sha256(b"".join(fields([header, *(part.encode() for part in parts)]))).hexdigest()


@dataclass
class _Pending:
    """A document that is not known to be unchanged."""

    place: int
    chunks: dict[str, Tensor]  # token ids (T,) of each key
    keys: list[str]
    num_tokens: int
    missing: list[str]  # keys that the store did not have, and no document before this one brings

    @property
    def num_missing(self) -> int:
        """Tokens to compute."""
        return sum(len(self.chunks[key]) for key in self.missing)


class _Run:
    """One call of `index_documents`."""

    def __init__(self, loom: Loom, documents: list[Document], source: str) -> None:
        self.loom = loom
        self.documents = documents
        self.source = source
        self.stored: Documents | None = documents_of(loom.store)
        self.header = loom.prefill_header()
        self.recipe = recipe(loom)

    def index(self, on_progress: Callable[[int, int], None] | None) -> list[IndexedDocument]:
        done: dict[int, IndexedDocument] = {}
        for place, document in enumerate(self.documents):
            unchanged = self._unchanged(document)
            if unchanged is not None:
                done[place] = unchanged
        pending = self._cut(done)
        count = _Count(sum(each.num_missing for each in pending), on_progress)
        for group in _groups(pending):
            missing = {key: each.chunks[key] for each in group for key in each.missing}
            self.loom.chunks.compute(self.header, missing, count.add)
            for each in group:
                done[each.place] = self._record(each)
        return [done[place] for place in range(len(self.documents))]

    def _unchanged(self, document: Document) -> IndexedDocument | None:
        """The document as it was recorded, if that is what it would be recorded as, and nothing is gone."""
        if self.stored is None or document.id is None:
            return None
        known = self.stored.get(document.id)
        if known is None or known.recipe != self.recipe or self.source not in ("", known.source):
            return None
        if known.content_hash != content_hash(document.text, document.title):
            return None
        if not all(key in self.loom.store for key in known.keys):
            return None
        return IndexedDocument(
            id=document.id,
            keys=known.keys,
            num_tokens=known.num_tokens,
            source=known.source,
            is_recorded=True,
            before=known,
            change=Change(kept=tuple(dict.fromkeys(known.keys))),
        )

    def _cut(self, done: dict[int, IndexedDocument]) -> list[_Pending]:
        places = [place for place in range(len(self.documents)) if place not in done]
        if not places:
            return []
        loom, wanted = self.loom, [self.documents[place] for place in places]
        pieces: list[list[Tensor]] = [[] for _ in places]
        for chunk in cut_into_chunks(loom.tokenizer, loom.prompt_format, wanted):
            pieces[chunk.document].append(chunk.token_ids)
        loom.chunks.check_lengths(self.header, [ids for of_one in pieces for ids in of_one])
        seen: set[str] = set()
        pending = []
        for place, of_one in zip(places, pieces, strict=True):
            keys = [loom.chunks.key(self.header, ids) for ids in of_one]
            missing = [key for key in dict.fromkeys(keys) if key not in seen and key not in loom.store]
            seen.update(keys)
            chunks = dict(zip(keys, of_one, strict=True))
            pending.append(_Pending(place, chunks, keys, sum(map(len, of_one)), missing))
        return pending

    def _record(self, pending: _Pending) -> IndexedDocument:
        document, keys = self.documents[pending.place], tuple(pending.keys)
        found = IndexedDocument(
            id=document.id,
            keys=keys,
            num_tokens=pending.num_tokens,
            source=self.source,
            computed=tuple(pending.missing),
            computed_tokens=pending.num_missing,
        )
        if self.stored is None or document.id is None:
            return found
        before = self.stored.get(document.id)
        hash, source = content_hash(document.text, document.title), self.source
        if not source and before is not None and before.content_hash == hash:
            source = before.source  # who names none may well index again what was read from a file
        change = self.stored.record(
            document.id,
            keys,
            source=source,
            content_hash=hash,
            recipe=self.recipe,
            num_tokens=pending.num_tokens,
        )
        if change.missing:  # freed or evicted before they were this document's
            store = self.loom.store
            self.loom.chunks.compute(self.header, {key: pending.chunks[key] for key in change.missing})
            if any(key not in store for key in change.missing):
                raise StoreError(
                    f"{store.where} does not keep the {len(set(keys))} chunks of document {document.id!r}; "
                    "raise its quota or its memory, or try again if another process is removing documents"
                )
        return replace(found, is_recorded=True, before=before, change=change)


class _Count:
    """Tells how much is done."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self._tell = 0, total, tell
        self.add(0)

    def add(self, number: int) -> None:
        self.done += number
        if self._tell is not None:
            self._tell(self.done, self.total)


def _groups(pending: Sequence[_Pending]) -> Iterator[list[_Pending]]:
    """Consecutive documents that are computed together."""
    group: list[_Pending] = []
    num_tokens = 0
    for each in pending:
        group.append(each)
        num_tokens += each.num_missing
        if num_tokens >= GROUP_TOKENS or len(group) == GROUP_DOCUMENTS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group
