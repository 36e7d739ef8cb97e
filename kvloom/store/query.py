"""The options behind a store's place, as in ``disk:PATH?codec=int8+zstd&namespace=acme``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kvloom.errors import MethodError
from kvloom.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_FLAGS = {"": True, "true": True, "false": False}


def split_query(rest: str) -> tuple[str, dict[str, str]]:
    """The place before the first ``?``, and the options after it; ``%3F`` and the like stand for characters.

    A ``+`` stays what it is, since codecs have it in their names. Raises ``MethodError`` for an option given
    twice or without a name.
    """
    place, _, query = rest.partition("?")
    options: dict[str, str] = {}
    for item in query.split("&") if query else []:
        name, _, value = item.partition("=")
        if not name or name in options:
            fault = "is given twice" if name else "has no name"
            raise MethodError(f"store option {item!r} {fault}; write for example ?codec=int8&namespace=acme")
        options[name] = unquote(value)
    return place, options


def parse_flag(text: str) -> bool:
    """True for ``true`` and for an option without a value. Raises ``ValueError``."""
    if text not in _FLAGS:
        raise ValueError("is neither true nor false")
    return _FLAGS[text]


ENTRY_OPTIONS: dict[str, Callable[[str], Any]] = {
    "codec": str,
    "key_file": str,
    "encrypted_only": parse_flag,
    "namespace": str,
}
"""What a store that keeps bytes takes, and how each is read from text."""


def convert(options: Mapping[str, str], known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options as arguments; raises ``MethodError`` for one that is not `known` or does not fit."""
    converted: dict[str, Any] = {}
    for name, text in options.items():
        if name not in known:
            raise MethodError(f"unknown store option {name!r}{did_you_mean(name, known)}")
        try:
            converted[name] = known[name](text)
        except MethodError:
            raise
        except ValueError as error:
            raise MethodError(f"store option {name}: {text!r} {error}") from None
    return converted
