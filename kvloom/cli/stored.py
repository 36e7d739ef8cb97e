"""``kvloom store add|reindex|show|pin|unpin|rebuild``: documents by name, and what is known of entries."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import indexing, session
from kvloom.cli.options import (
    AsJson,
    ChunkCompressor,
    ChunkTokens,
    Device,
    DtypeOption,
    Model,
    Namespace,
    Source,
    StoreUrl,
    store_url,
)
from kvloom.cli.output import Activity, count, echo_json, remark, size
from kvloom.errors import DocumentError, MethodError

if TYPE_CHECKING:
    from kvloom.prompt import Document
    from kvloom.store import Store
    from kvloom.store.documents import StoredDocument

MIN_PREFIX = 6

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help=f"Document ids, or keys by their first {MIN_PREFIX} characters or more."
    ),
]


def add(
    source: Source,
    model: Model = None,
    store: StoreUrl = None,
    namespace: Namespace = None,
    chunk_tokens: ChunkTokens = 1024,
    chunk_compressor: ChunkCompressor = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Compute and store documents under their ids, in place of earlier ones.

    Only changed chunks are computed; chunks that no document has any more are freed.
    """
    name = session.need_model(model)
    url = store_url(store, shared=True)
    compressor = session.build_compressor(chunk_compressor)
    documents, _ = session.load_source(source)
    _ = open_shared(url, namespace).documents  # a store that keeps none says so before the model is loaded
    loom = session.open_loom(name, url, chunk_tokens, dtype, device, compressor, namespace=namespace)
    indexing.echo_documents(indexing.index(loom, {indexing.origin(source): documents}), json=json)


def reindex(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Documents; all of them by default.")
    ] = None,
    model: Model = None,
    store: StoreUrl = None,
    namespace: Namespace = None,
    chunk_tokens: ChunkTokens = 1024,
    chunk_compressor: ChunkCompressor = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Read documents again from where they came from, and store what changed.

    Documents whose source is gone stay as they are, with a remark.
    """
    name = session.need_model(model)
    url = store_url(store, shared=True)
    compressor = session.build_compressor(chunk_compressor)
    recorded = _documents(open_shared(url, namespace), ids)
    wanted = _sources(recorded, is_named=bool(ids))
    loom = session.open_loom(name, url, chunk_tokens, dtype, device, compressor, namespace=namespace)
    indexing.echo_documents(indexing.index(loom, wanted), json=json)


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"Document id, or a key by its first {MIN_PREFIX} characters or more."
        ),
    ],
    store: StoreUrl = None,
    namespace: Namespace = None,
    json: AsJson = False,
) -> None:
    """Show a document and its chunks, or an entry; of what is not there, why."""
    opened = open_shared(store, namespace)
    document = find_document(opened, name)
    shown = _entry(opened, name) if document is None else _document(opened, document)
    if json:
        echo_json(shown)
        return
    for field, value in shown.items():
        if field == "chunks":
            typer.echo("chunks")
            for chunk in value:
                state = "stored" if chunk["stored"] else f"not stored: {chunk['reason']}"
                typer.echo(f"  {chunk['key'][:16]}  {state}")
        else:
            text = ", ".join(value) if isinstance(value, list) else value
            typer.echo(f"{field:<12} {text}")


def pin(names: Names, store: StoreUrl = None, namespace: Namespace = None, json: AsJson = False) -> None:
    """Keep entries, or all chunks of documents, from being evicted."""
    _each(open_shared(store, namespace), names, "pinned", json)


def unpin(names: Names, store: StoreUrl = None, namespace: Namespace = None, json: AsJson = False) -> None:
    """Let pinned entries be evicted again."""
    _each(open_shared(store, namespace), names, "unpinned", json)


def rebuild(store: StoreUrl = None, namespace: Namespace = None, json: AsJson = False) -> None:
    """Make the index anew from what the files say of themselves."""
    opened = open_shared(store, namespace)
    start = time.perf_counter()
    with Activity("reading heads (entries)") as activity:
        entries = opened.rebuild(lambda done: activity.update(done, 0))
    documents = len(opened.documents.all())
    seconds = time.perf_counter() - start
    if json:
        echo_json({"entries": entries, "documents": documents, "seconds": seconds})
    else:
        noun = "entry" if entries == 1 else "entries"
        typer.echo(f"{entries:,} {noun} and {count(documents, 'document')} in the index")


def open_shared(url: str | None, namespace: str | None = None) -> "Store":
    """The store, or its part for the namespace, which outlives this process."""
    url = store_url(url, shared=True)
    from kvloom.store import open_store

    return open_store(url, namespace=namespace)


def find_document(store: "Store", name: str) -> "StoredDocument | None":
    """The document of that id, if the store keeps documents and has it."""
    from kvloom.store.documents import documents_of

    documents = documents_of(store)
    return None if documents is None else documents.get(name)


def all_documents(store: "Store") -> "list[StoredDocument]":
    """Those of a store that keeps documents; of another, none."""
    from kvloom.store.documents import documents_of

    documents = documents_of(store)
    return [] if documents is None else documents.all()


def only_key(prefix: str, keys: list[str]) -> str:
    """The one key that begins with `prefix`; ``MethodError`` for none, several, or too short a prefix."""
    if len(prefix) < MIN_PREFIX:
        raise MethodError(f"key {prefix!r} is too short; give at least its first {MIN_PREFIX} characters")
    found = [key for key in keys if key.startswith(prefix.lower())]
    if not found:
        raise MethodError(f"no entry's key begins with {prefix!r}; see kvloom store list")
    if len(found) > 1:
        raise MethodError(f"{count(len(found), 'key')} begin with {prefix!r}; give more characters")
    return found[0]


def _documents(store: "Store", ids: list[str] | None) -> "list[StoredDocument]":
    documents = store.documents
    if not ids:
        return documents.all()
    found = []
    for id in ids:
        document = documents.get(id)
        if document is None:
            raise DocumentError(f"there is no document {id!r}; see kvloom store list --documents")
        found.append(document)
    return found


def _sources(recorded: "list[StoredDocument]", *, is_named: bool) -> "dict[str, list[Document]]":
    """What the sources hold now of the recorded documents."""
    ids: dict[str, list[str]] = {}
    for document in recorded:
        if not document.source and is_named:
            raise DocumentError(f"document {document.id!r} came from no file; add it again")
        if document.source:
            ids.setdefault(document.source, []).append(document.id)
    wanted: dict[str, list[Document]] = {}
    for source, of_source in ids.items():
        try:
            now = {document.id: document for document in session.load_source(source)[0]}
        except DocumentError as error:
            remark(f"left as they are: {count(len(of_source), 'document')}: {error}")
            continue
        wanted[source] = [now[id] for id in of_source if id in now]
        for id in of_source:
            if id not in now:
                remark(f"left as it is: {id} is not in {source} any more; kvloom store rm removes it")
    return wanted


def _document(store: "Store", document: "StoredDocument") -> dict[str, Any]:
    chunks = []
    for key in document.keys:
        is_stored = key in store
        reason = None if is_stored else store.absence(key)[0].value
        chunks.append({"key": key, "stored": is_stored, "reason": reason})
    return {
        "id": document.id,
        "source": document.source,
        "content_hash": document.content_hash,
        "recorded": _when(document.recorded),
        "chunks": chunks,
    }


def _entry(store: "Store", name: str) -> dict[str, Any]:
    from kvloom.store.base import is_key

    whole = is_key(name.lower())
    key = name.lower() if whole else only_key(name, list(store.keys()))
    head = store.describe(key)
    if head is None:
        reason, detail = store.absence(key)
        raise DocumentError(f"{key} is not stored: {reason.value}{f': {detail}' if detail else ''}")
    users = [document.id for document in all_documents(store) if key in document.keys]
    return {
        "key": head.key,
        "tokens": head.num_tokens,
        "size": size(head.num_bytes),
        "start": head.start,
        "codec": head.codec,
        "encrypted": head.is_encrypted,
        "model": head.fingerprint,
        "pinned": store.is_pinned(key),
        "documents": users,
    }


def _each(store: "Store", names: list[str], done: str, json: bool) -> None:
    """Pins or unpins every entry that the names mean."""
    change = store.pin if done == "pinned" else store.unpin
    held: list[str] | None = None
    keys: dict[str, None] = {}
    for name in names:
        document = find_document(store, name)
        if document is not None:
            keys.update(dict.fromkeys(document.keys))
        else:
            held = list(store.keys()) if held is None else held
            keys[only_key(name, held)] = None
    changed = [key for key in keys if change(key)]
    if json:
        echo_json({done: changed})
    else:
        typer.echo(f"{len(changed):,} entr{'y' if len(changed) == 1 else 'ies'} {done}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
