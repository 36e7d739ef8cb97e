"""Rows of documents in the index; each function is called inside a transaction of `ChunkIndex.run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from kvloom.store.documents import StoredDocument

_COLUMNS = ("id", "source", "content_hash", "recipe", "num_tokens", "recorded")


def users(db: sqlite3.Connection, keys: Iterable[str]) -> dict[str, int]:
    """Of each key that any document has, how many documents have it."""
    count = "SELECT count(DISTINCT id) FROM document_chunks WHERE key = ?"
    found = {key: db.execute(count, (key,)).fetchone()[0] for key in keys}
    return {key: number for key, number in found.items() if number}


def select(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """The fields of every document, by id."""
    keys: dict[str, list[str]] = {}
    for id, key in db.execute("SELECT id, key FROM document_chunks ORDER BY id, place"):
        keys.setdefault(id, []).append(key)
    rows = db.execute(f"SELECT {', '.join(_COLUMNS)} FROM documents").fetchall()
    return [
        dict(zip(_COLUMNS, row, strict=True)) | {"keys": tuple(keys.get(row[0], ()))} for row in sorted(rows)
    ]


def insert(db: sqlite3.Connection, document: StoredDocument) -> None:
    values = [vars(document)[name] for name in _COLUMNS]
    places = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO documents ({', '.join(_COLUMNS)}) VALUES ({places})", values)
    rows = [(document.id, place, key) for place, key in enumerate(document.keys)]
    db.executemany("INSERT INTO document_chunks VALUES (?, ?, ?)", rows)


def delete(db: sqlite3.Connection, id: str) -> None:
    db.execute("DELETE FROM documents WHERE id = ?", (id,))
    db.execute("DELETE FROM document_chunks WHERE id = ?", (id,))


def clear(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM documents")
    db.execute("DELETE FROM document_chunks")


def stamp(db: sqlite3.Connection) -> str | None:
    """What `set_stamp` wrote last: the folder as the rows know it."""
    row = db.execute("SELECT value FROM meta WHERE name = 'documents'").fetchone()
    return None if row is None else row[0]


def set_stamp(db: sqlite3.Connection, stamp: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES ('documents', ?)", (stamp,))
