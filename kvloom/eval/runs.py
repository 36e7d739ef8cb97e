"""Run folders, read and merged: what was measured, by which method, on which samples.

Runs belong together when the model, the prompt format, the chunking and the samples are the same: only then
do their numbers stand beside each other. A method is its recipe, whatever it was called on the command line.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kvloom.compressors import compressors
from kvloom.errors import EvalError
from kvloom.eval.runner import Recipe, Result, read_lines
from kvloom.selectors import selectors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvloom.registry import Registry

_TRACED = ("context_tokens", "recomputed_rows", "token_layers", "kv_bytes", "seconds")
BUDGETS = ("ratio", "k")
"""Options that say how much is recomputed."""


@dataclass(frozen=True)
class Entry:
    """A method as the results name it; two are equal when their recipes are."""

    recipe: str
    name: str = field(compare=False)  # registered one, "infoflow"
    labels: tuple[str, ...] = field(compare=False)  # as written on the command line
    options: dict[str, Any] = field(compare=False)
    shown: str = field(compare=False)  # the ratio, and options that are not the defaults

    @property
    def title(self) -> str:
        return f"{self.name} {self.shown}".strip()

    def is_called(self, name: str) -> bool:
        """Whether `name` is how the command line or the report's tables write it."""
        return name in (*self.labels, self.title)

    @property
    def is_none(self) -> bool:
        """Whether this is the anchor at which nothing of the gap is closed."""
        return (
            self.name == "none"
            and self.options.get("layout", "global") == "global"
            and not self.options["reorder"]
            and "compressor" not in self.options
        )

    @property
    def is_full(self) -> bool:
        """Whether this is full prefill, the anchor at which the whole gap is closed."""
        return self.name == "full"


@dataclass(frozen=True)
class Measurement:
    """A result, with the time that full prefill of the same sample took in the same run, if it was run."""

    result: Result
    full_ttft_s: float | None


Table = dict[Entry, dict[str, Measurement]]
"""What was measured on one set, by method and sample."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that ``kvloom eval`` made."""

    folder: Path
    recipe: Recipe
    results: list[Result]
    skipped: list[dict[str, str]]
    changed_s: float  # when the results were last written to

    def belongs_with(self, other: RunFolder) -> bool:
        """Whether results of both may be compared: all that decides them, but for the methods, is equal."""
        mine, theirs = self.recipe, other.recipe
        same = ("fingerprint", "prompt_format", "chunks")
        return (
            all(getattr(mine, name) == getattr(theirs, name) for name in same)
            and all(mine.data[name] == theirs.data[name] for name in mine.data.keys() & theirs.data.keys())
            and 0 in (mine.max_new_tokens, theirs.max_new_tokens, mine.max_new_tokens - theirs.max_new_tokens)
        )


@dataclass(frozen=True)
class Section:
    """Runs that belong together."""

    runs: list[RunFolder]
    tables: dict[str, Table]  # by set
    remarks: list[str]


def read(folder: Path) -> RunFolder:
    """The run in `folder`. Raises ``EvalError`` for a folder without a run or without results."""
    path = folder / "run.json"
    if not path.is_file():
        raise EvalError(f"{str(folder)!r} has no run.json; name a folder that `kvloom eval --out` made")
    try:
        recipe = Recipe(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise EvalError(
            f"{str(path)!r} is not the recipe of a run of this version of kvloom: {error}"
        ) from None
    lines = folder / "results.jsonl"
    results = [_result(line, lines) for line in read_lines(lines)]
    if not results:
        raise EvalError(
            f"{str(folder)!r} has no results yet; let `kvloom eval --out {folder.name}` run to its end first"
        )
    return RunFolder(folder, recipe, results, read_lines(folder / "skipped.jsonl"), lines.stat().st_mtime)


def _result(line: Any, path: Path) -> Result:
    try:
        result = Result(**line)
        missing = [name for name in _TRACED if name not in result.trace]
    except TypeError as error:
        raise EvalError(
            f"{str(path)!r} holds a line that is no result of this version: {error}; run it anew"
        ) from None
    if missing:
        raise EvalError(f"{str(path)!r} holds a trace without {missing[0]}; run it anew with this version")
    return result


def merge(runs: Sequence[RunFolder]) -> list[Section]:
    """The runs in groups that belong together, in the order given. Of a method that two runs have measured on
    the same set, the newer run's results stand, and a remark says so.
    """
    groups: list[list[RunFolder]] = []
    for run in runs:
        group = next((g for g in groups if all(run.belongs_with(other) for other in g)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return [_section(group) for group in groups]


def _section(runs: list[RunFolder]) -> Section:
    entries = _entries(runs)
    tables: dict[str, Table] = {name: {} for run in runs for name in run.recipe.data}
    twice: dict[tuple[Entry, str], dict[str, float]] = {}
    for run in sorted(runs, key=lambda run: run.changed_s):
        for name, table in _tables(run, entries).items():
            held = tables.setdefault(name, {})
            for entry, measured in table.items():
                if entry in held:
                    changes = twice.setdefault((entry, run.folder.name), {})
                    changes[name] = _change(held[entry], measured)
                held[entry] = measured
    ordered = sorted(entries.values(), key=lambda entry: (not entry.is_none, entry.is_full))
    tables = {
        name: {entry: table[entry] for entry in ordered if entry in table} for name, table in tables.items()
    }
    remarks = [_replaced(entry, folder, changes) for (entry, folder), changes in twice.items()]
    return Section(runs, {name: table for name, table in tables.items() if table}, remarks)


def _tables(run: RunFolder, entries: dict[str, Entry]) -> dict[str, Table]:
    full_ttft = {
        (result.benchmark, result.sample): result.trace["seconds"]["ttft"]
        for result in run.results
        if entries[result.recipe].is_full
    }
    tables: dict[str, Table] = {}
    for result in run.results:
        table = tables.setdefault(result.benchmark, {})
        samples = table.setdefault(entries[result.recipe], {})
        samples[result.sample] = Measurement(result, full_ttft.get((result.benchmark, result.sample)))
    return tables


def _change(old: dict[str, Measurement], new: dict[str, Measurement]) -> float:
    """The largest difference in KL on the same sample."""
    return max((abs(new[s].result.kl - old[s].result.kl) for s in old.keys() & new.keys()), default=0.0)


def _replaced(entry: Entry, folder: str, changes: dict[str, float]) -> str:
    change = max(changes.values())
    verdict = "the same KL in both" if change < 1e-6 else f"KL of a sample differs by up to {change:.2g}"
    where = ", ".join(changes)
    return f"{entry.title} stands twice on {where}; that of {folder}, the newer, is used ({verdict})."


def _entries(runs: Iterable[RunFolder]) -> dict[str, Entry]:
    """Methods by recipe, in the order of the command lines."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        places = {label: place for place, label in enumerate(run.recipe.methods)}
        for result in sorted(run.results, key=lambda result: places.get(result.method, len(places))):
            if result.method not in labels.setdefault(result.recipe, []):
                labels[result.recipe].append(result.method)
    names = {recipe: re.split("[:@]", written[0])[0] for recipe, written in labels.items()}
    options = {recipe: parse_recipe(recipe) for recipe in labels}
    shown = {recipe: _shown(name, options[recipe]) for recipe, name in names.items()}
    titles = Counter((names[recipe], text) for recipe, text in shown.items())
    return {
        recipe: Entry(
            recipe,
            name,
            tuple(labels[recipe]),
            options[recipe],
            shown[recipe] if titles[name, shown[recipe]] == 1 else recipe,
        )
        for recipe, name in names.items()
    }


def _shown(name: str, options: dict[str, Any]) -> str:
    """The ratio and all that is not as the method has it by default."""
    cls = selectors.get(name)
    defaults: dict[str, Any] = {"reorder": False}
    if cls is not None:
        defaults |= {field.name: field.default for field in fields(cls)}
    compressor = options.get("compressor")
    words = _words({k: v for k, v in options.items() if k != "compressor"}, defaults, always="ratio")
    if compressor is None:
        return " ".join(words)
    name, given, defaults = read_recipe(compressor, compressors)
    return " ".join([*words, f"@ {name}", *_words(given, defaults, always="keep")])


def _words(options: Mapping[str, Any], defaults: Mapping[str, Any], *, always: str) -> list[str]:
    """The option that always stands there, and those that are not as by default."""
    return [
        f"{option}={as_text(value)}"
        for option, value in options.items()
        if option == always or value != defaults.get(option, MISSING)
    ]


def read_recipe(recipe: str, registry: Registry[Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Of ``SnapKV(keep=0.4)``: the registered name of the class, the options given, and the default ones."""
    class_name = recipe.partition("(")[0]
    name = next((name for name in registry if registry[name].__name__ == class_name), class_name)
    cls = registry.get(name)
    defaults = {} if cls is None else {field.name: field.default for field in fields(cls)}
    return name, {k: v for k, v in parse_recipe(recipe).items() if k != "reorder"}, defaults


def parse_recipe(recipe: str) -> dict[str, Any]:
    """The options in a recipe such as ``InfoFlow(ratio=0.15) reorder=True @ SnapKV(keep=0.4)``,
    of which what compressed the chunks is one, "compressor".
    """
    recipe, _, compressor = recipe.partition(" @ ")
    if compressor:
        return {**parse_recipe(recipe), "compressor": compressor}
    call, _, reorder = recipe.partition(") reorder=")
    try:
        node = ast.parse(f"{call})" if reorder else call, mode="eval").body
        if not isinstance(node, ast.Call):
            raise ValueError("not a call")
        options = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    except (SyntaxError, ValueError):
        options = {"recipe": recipe}  # a method from elsewhere, whose repr is its own
    return {**options, "reorder": reorder if reorder == "chunks" else reorder == "True"}


def as_text(value: Any) -> str:
    """An option's value as the command line takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(as_text, value))
    return str(value)


def families(entries: Iterable[Entry], *without: str) -> list[list[Entry]]:
    """Entries that differ in nothing but the options named, in order; a family may have one member."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        rest = {option: value for option, value in entry.options.items() if option not in without}
        found.setdefault(f"{entry.name} {sorted(rest.items(), key=str)}", []).append(entry)
    return list(found.values())
