"""Where kvloom keeps files on the user's machine."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """``$KVLOOM_CACHE``, or ``kvloom`` in the user's cache folder: for files that can be made again.

    The user's cache folder is ``$XDG_CACHE_HOME``, or ``~/.cache``. An empty variable counts as unset.
    Nothing is created.
    """
    if folder := os.environ.get("KVLOOM_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "kvloom"


def write_whole(path: Path, text: str) -> None:
    """The file holds the text, durably; after an exception, nothing has changed. Raises ``OSError``."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
