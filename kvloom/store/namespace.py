"""Namespaces: tenants that share a place and see nothing of each other.

Two walls: the namespace is a field of every chunk key (`kvloom.store.base.chunk_key`), and in a shared place
each namespace has a room of its own, named by `namespace_id`, which no other's keys lead into.
"""

from __future__ import annotations

import hashlib

from kvloom.errors import MethodError
from kvloom.store.base import fields

MAX_CHARACTERS = 200


def check_namespace(namespace: str) -> None:
    """Raises ``MethodError`` unless it is printable text of 1 to 200 characters."""
    if not namespace or len(namespace) > MAX_CHARACTERS or not namespace.isprintable():
        raise MethodError(
            f"namespace {namespace!r} is not printable text of 1 to {MAX_CHARACTERS} characters; "
            "write for example namespace=acme"
        )


def namespace_id(namespace: str) -> str:
    """32 lower-case hexadecimal characters: the name of its room, whatever characters it has."""
    check_namespace(namespace)
    return hashlib.sha256(b"".join(fields([b"kvloom-namespace", namespace.encode()]))).hexdigest()[:32]


def parse_namespace(text: str) -> str:
    """The namespace that an option names; raises ``MethodError``."""
    check_namespace(text)
    return text
