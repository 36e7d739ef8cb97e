"""Facts: what the head of a report says on how its numbers came about."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import MISSING
from typing import TYPE_CHECKING

from kvloom.eval.benchmark import benchmarks
from kvloom.eval.page import Bullets, Code, Grid, Heading
from kvloom.eval.runs import parse_recipe, read_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvloom.eval.page import Block
    from kvloom.eval.runner import Recipe
    from kvloom.eval.runs import Section


def facts(section: Section) -> Iterator[Block]:
    """Model, versions, commands, data with licences, what was skipped or replaced, and exact methods."""
    runs, recipe = section.runs, section.runs[0].recipe
    lines = [
        ["model", ", ".join(dict.fromkeys(run.recipe.model for run in runs))],
        ["fingerprint", recipe.fingerprint[:16]],
        ["prompt format", recipe.prompt_format],
        ["chunks", recipe.chunks],
        ["versions", "; ".join(dict.fromkeys(_versions(run.recipe) for run in runs))],
    ]
    yield Heading(2, recipe.model)
    yield Grid(["", ""], lines, num_text=2)
    yield Code("\n".join(eval_command(run.recipe, run.folder.name) for run in runs))
    yield Heading(3, "Data")
    yield Grid(["set", "multi-hop", "licence", "digest", "N", "skipped"], _data(section), num_text=4)
    if remarks := [*section.remarks, *_skipped(section)]:
        yield Bullets(remarks)
    yield Heading(3, "Methods")
    entries = dict.fromkeys(entry for table in section.tables.values() for entry in table)
    named = [[entry.name, entry.shown, entry.recipe, ", ".join(entry.labels)] for entry in entries]
    yield Grid(["method", "options", "exact recipe", "written as"], named, num_text=4)


def eval_command(recipe: Recipe, out: str) -> str:
    """The command line that makes a run of this recipe."""
    words = ["kvloom", "eval", *map(_set_text, recipe.benchmarks), "-m", recipe.model]
    for label in recipe.methods:
        words += ["-s", label]
    if recipe.limit is not None:
        words += ["--limit", str(recipe.limit)]
    if recipe.chunks != "passages":
        words += ["--chunks", recipe.chunks]
    words += _prompt_options(recipe.prompt_format)
    if recipe.max_context is not None:
        words += ["--max-context", str(recipe.max_context)]
    if recipe.max_new_tokens:
        words += ["--max-new-tokens", str(recipe.max_new_tokens)]
    return shlex.join([*words, "--out", out])


def _prompt_options(prompt_format: str) -> list[str]:
    """What the command line can say of a prompt format; all else is as by default."""
    options = parse_recipe(prompt_format)
    words = ["--chunk-tokens", str(options["chunk_tokens"])] if "chunk_tokens" in options else []
    return [*words, "--header", options["header"]] if options.get("header", "shared") != "shared" else words


def _set_text(written: str) -> str:
    """``Needle(lengths=(1000,), depths=(0, 50), ...)`` as the command line takes it, defaults left out."""
    name, options, defaults = read_recipe(written, benchmarks)
    parts = [
        f"{option}={json.dumps(value, separators=(',', ':')) if isinstance(value, tuple) else value}"
        for option, value in options.items()
        if value != defaults.get(option, MISSING)
    ]
    return f"{name}:{','.join(parts)}" if parts else name


def _versions(recipe: Recipe) -> str:
    versions = {"kvloom": recipe.kvloom_version, **recipe.versions}
    return ", ".join(f"{what} {version}" for what, version in versions.items())


def _data(section: Section) -> list[list[str]]:
    digests = {name: digest for run in section.runs for name, digest in run.recipe.data.items()}
    skipped = Counter(name for name, _ in _skipped_samples(section))
    lines = []
    for name in digests:
        cls = benchmarks.get(name)  # None for a set of a package that is not installed here
        hops = "unknown" if cls is None else "yes" if cls.is_multihop else "no"
        licence = "unknown" if cls is None else cls.licence
        samples = {sample for measured in section.tables.get(name, {}).values() for sample in measured}
        lines.append([name, hops, licence, digests[name][:12], str(len(samples)), str(skipped[name])])
    return lines


def _skipped_samples(section: Section) -> dict[tuple[str, str], str]:
    """The reason by set and sample."""
    lines = [line for run in section.runs for line in run.skipped]
    return {(line["benchmark"], line["sample"]): line["reason"] for line in lines}


def _skipped(section: Section) -> Iterator[str]:
    """One line for each set and reason; reasons that differ in numbers only are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (name, _), reason in _skipped_samples(section).items():
        groups.setdefault((name, re.sub(r"\d[\d,.]*", "#", reason)), []).append(reason)
    for (name, _), reasons in groups.items():
        example = "" if len(set(reasons)) == 1 else "for example "
        yield f"Skipped on {name}: {len(reasons)}, {example}{reasons[0]}"
