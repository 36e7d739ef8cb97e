"""Namespaces: tenants that share a place and see nothing of each other.

Two walls: the namespace is a field of every chunk key (`kvloom.store.base.chunk_key`), and in a shared place
each namespace has a room of its own, named by `namespace_id`, which no other's keys lead into.
"""

from __future__ import annotations

import hashlib

from kvloom.errors import MethodError
from kvloom.store.base import fields

MAX_CHARACTERS = 200


def parse_namespace(text: str) -> str:
    """The text, which must be printable, of 1 to 200 characters; raises ``MethodError``."""
    if not text or len(text) > MAX_CHARACTERS or not text.isprintable():
        raise MethodError(
            f"namespace {text!r} is not printable text of 1 to {MAX_CHARACTERS} characters; "
            "write for example namespace=acme"
        )
    return text


def namespace_id(namespace: str) -> str:
    """32 lower-case hexadecimal characters: the name of its room, whatever characters it has."""
    parts = [b"kvloom-namespace", parse_namespace(namespace).encode()]
    return hashlib.sha256(b"".join(fields(parts))).hexdigest()[:32]
