"""Where kvloom keeps files on the user's machine."""

from __future__ import annotations

import os
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
