"""Journal: the folder of a run, resumable. ``run.json`` holds the recipe, ``results.jsonl`` one JSON line per
result.

A run that was interrupted goes on where it stopped; a folder made by another recipe is refused.
"""

from __future__ import annotations

import json
import logging
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvloom.errors import EvalError
from kvloom.paths import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)


class Journal:
    """A folder of results, made by one recipe, which is a dataclass; `key` are the fields of a line that say
    what it is a result of. Raises ``EvalError`` for a folder made by another recipe.
    """

    def __init__(self, folder: Path, recipe: Any, key: Sequence[str]) -> None:
        self.folder = folder
        self.key = tuple(key)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvalError(f"cannot make the run folder {str(folder)!r}: {error.strerror}") from error
        self.results = folder / "results.jsonl"
        self._adopt(asdict(recipe))
        lines = read_lines(self.results)
        self.done = {tuple(line[name] for name in key) for line in lines if set(key) <= line.keys()}

    def _adopt(self, wanted: dict[str, Any]) -> None:
        path = self.folder / "run.json"
        if not path.exists():
            write_whole(path, json.dumps(wanted, indent=2) + "\n")
            return
        try:
            held = dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError):
            raise EvalError(f"{str(path)!r} is not the recipe of a run; give another --out folder") from None
        differing = [name for name in wanted if name != "versions" and held.get(name) != wanted[name]]
        if differing:
            what = "; ".join(
                f"{name} {_short(held.get(name))} there, {_short(wanted[name])} now" for name in differing
            )
            raise EvalError(
                f"{str(self.folder)!r} holds a run of another recipe ({what}); give another --out folder"
            )

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line and flushes it, so that an interrupted run loses nothing that is finished."""
        self.done.add(tuple(line[name] for name in self.key))
        append_line(self.results, line)


def versions() -> dict[str, str]:
    """Of what the numbers depend on besides kvloom."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("torch", "transformers")}


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a JSON line; one that a crash cut short stays a line of its own."""
    line = json.dumps(value) + "\n"  # ASCII: nothing in a text can end the line or be cut in two
    if path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n":
        line = "\n" + line
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, none if it does not exist; a line that a crash cut short is left out."""
    lines = []
    if path.exists():
        for text in filter(None, path.read_bytes().split(b"\n")):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                logger.warning("%s: a line was cut short and is left out", path)
    return lines


def read_run(folder: Path, *, made_by: str, mark: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The recipe and the result lines in `folder`; `mark` is a field that only recipes of this kind have.

    Raises ``EvalError`` for a folder without a run, of another kind, or without results.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise EvalError(f"{str(folder)!r} has no run.json; name a folder that `{made_by} --out` made")
    try:
        recipe = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EvalError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(recipe, dict) or mark not in recipe:
        raise EvalError(f"{str(path)!r} is not the recipe of a run of `{made_by}`")
    lines = read_lines(folder / "results.jsonl")
    if not lines:
        raise EvalError(f"{str(folder)!r} has no results yet; let `{made_by} --out {folder.name}` run first")
    return recipe, lines


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
