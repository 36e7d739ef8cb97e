"""Rows of data sets on the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvloom.errors import EvalError

if TYPE_CHECKING:
    from collections.abc import Iterable


def hub_rows(
    who: str, what: str, *path: str, source: str | None = None, otherwise: str = "", **options: Any
) -> Iterable[dict[str, Any]]:
    """The rows of `what`, part of `source`, from the hub or its local cache; `path` and `options` are
    ``datasets.load_dataset``'s.

    Raises ``EvalError`` without the package `datasets` and for whatever `datasets` raises; the message names
    what to do `otherwise`.
    """
    try:
        datasets = import_module("datasets")
    except ImportError:
        instead = f"{otherwise}, or " if otherwise else ""
        raise EvalError(
            f"{who}: {instead}pip install 'kvloom[eval]' to read {source or what} from the Hugging Face hub"
        ) from None
    try:
        return datasets.load_dataset(*path, **options)
    except Exception as error:  # of many libraries: network, hub, file formats
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        instead = f", or {otherwise}" if otherwise else ""
        raise EvalError(
            f"{who}: {what} could not be read from the Hugging Face hub ({reason}); try again{instead}"
        ) from error
