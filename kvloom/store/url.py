"""The URLs of stores: tiers apart by commas, options behind a question mark."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote

from kvloom.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_COMMA = re.compile(r",(?=([A-Za-z_][A-Za-z0-9_]*):)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def split_tiers(url: str, schemes: Collection[str]) -> list[str]:
    """The URLs that `url` joins by commas; a comma that no scheme follows belongs to a path."""
    parts, begin = [], 0
    for comma in _COMMA.finditer(url):
        if comma[1] in schemes:
            parts.append(url[begin : comma.start()])
            begin = comma.end()
    return [*parts, url[begin:]]


def split_options(name: str, rest: str) -> tuple[str, dict[str, str]]:
    """The place, percent-escapes resolved, and the options of ``PLACE?option=value&...``.

    A ``+`` is a plus, as codecs and paths have it, and no space as in forms of the web.
    """
    place, mark, query = rest.partition("?")
    try:
        pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(mark))
    except ValueError:
        raise MethodError(
            f"store {name!r}: {query!r} is not of the form option=value&option=value; "
            "write a question mark of the path itself as %3F"
        ) from None
    options: dict[str, str] = {}
    for option, value in pairs:
        if option in options:
            raise MethodError(f"store {name!r}: option {option!r} is given twice")
        options[option] = value
    return unquote(place), options


def with_option(url: str, name: str, value: str) -> str:
    """The URL of one store, with one more option."""
    return f"{url}{'&' if '?' in url else '?'}{name}={quote(value, safe='')}"


def read_options(
    name: str, options: Mapping[str, str], readers: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    """Each option as its reader gives it; ``MethodError`` names the valid ones for one without a reader."""
    values = {}
    for option, text in options.items():
        if option not in readers:
            known = ", ".join(sorted(readers)) or "none"
            raise MethodError(f"store {name!r} has no option {option!r}; there are: {known}")
        try:
            values[option] = readers[option](text)
        except MethodError as error:
            raise MethodError(f"store {name!r}: option {option!r}: {error}") from None
    return values


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB`` (2**32), ``500MB`` (500 * 10**6) or ``4096``; at least 1.

    Units are B, kB, MB, GB, TB and KiB, MiB, GiB, TiB in any case. Raises ``MethodError`` for anything else.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise MethodError(f"size {text!r} is not a number with a unit; write for example 4GiB or 500MB")
    # Integers only: a float would round sizes beyond 2**53.
    whole, _, fraction = match[1].partition(".")
    size = int(whole + fraction) * _UNITS[match[2]] // 10 ** len(fraction)
    if size < 1:
        raise MethodError(f"size {text!r} is less than one byte; write for example 4GiB or 500MB")
    return size


def parse_seconds(text: str) -> float:
    """Seconds, more than 0; raises ``MethodError``."""
    seconds = parse_duration(text)
    if seconds == 0:
        raise MethodError("0 seconds leave no time; give more than 0")
    return seconds


def parse_duration(text: str) -> float:
    """Seconds, 0 or more; raises ``MethodError``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise MethodError(f"{text!r} is not a number of seconds; write for example 0.5 or 3600")
    return seconds


def parse_bool(text: str) -> bool:
    """``true`` or ``false``; raises ``MethodError``."""
    if text not in ("true", "false"):
        raise MethodError(f"{text!r} is neither true nor false")
    return text == "true"
