"""The report of a fidelity run: every method at every share, rivals paired by document, KL by distance."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvloom.eval import plots
from kvloom.eval.comparison import SEED
from kvloom.eval.continuations import far, near
from kvloom.eval.journal import read_run
from kvloom.eval.page import Bullets, Grid, Heading, Paragraph, Picture
from kvloom.eval.paired import (
    PAIRED_HEADER,
    RESAMPLES,
    curves,
    mean_text,
    milli,
    paired,
    verdict,
    write_report,
)
from kvloom.eval.texts import CHUNK, NEAR

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvloom.eval.page import Block

Lines = dict[str, dict[str, Any]]
"""Result lines of one method at one share, by document."""

_MEASURES = (
    f"KL: mean over the continuation's tokens of KL(full cache || compressed cache) of the next token, in "
    f"thousandths of a nat; near: its first {NEAR} tokens, far: its second half; both fixed beforehand.",
    "dNLL: negative log-likelihood of the text's own next token less that over the full cache, in "
    "thousandths of a nat. Agreement: share of tokens whose likeliest successor is the full cache's.",
    f"[ ]: 95 % interval, percentile bootstrap over documents, {RESAMPLES:,} resamples, seed {SEED}; p: "
    "sign-flip test; both paired by document. A difference is claimed where the interval excludes 0 and p is "
    "below 0.05. KL has heavy tails, so medians stand beside means.",
    "keep is the share of tokens KEPT. Kept: places, mean over layers and documents. MB: keys and values "
    "after compression.",
)


def report(folder: Path) -> Path:
    """Writes ``report.md`` and ``report.html`` into the folder of a run, and returns the page.

    Raises ``EvalError`` for a folder without a run, and without matplotlib.
    """
    plots.require_matplotlib()
    recipe, lines = read_run(folder, made_by="kvloom fidelity", mark="keeps")
    title = f"Compressed caches against the full cache: {recipe['model']}"
    blocks: list[Block] = [Heading(1, title), Bullets([_setting(recipe), *_MEASURES])]
    for name in recipe["sets"]:
        blocks += _set_blocks(name, [line for line in lines if line["set"] == name], recipe)
    return write_report(folder, title, blocks)


def _setting(recipe: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in recipe["versions"].items())
    return (
        f"{recipe['documents']} documents of each text set: a prefix of {recipe['prefix']:,} tokens is "
        f"prefilled and compressed, {recipe['continuation']:,} tokens after it are run over the full and "
        f"over each compressed cache. Model {recipe['fingerprint'][:12]}; kvloom "
        f"{recipe['kvloom_version']}, {versions}."
    )


def _set_blocks(name: str, lines: list[dict[str, Any]], recipe: dict[str, Any]) -> list[Block]:
    by: dict[tuple[str, float], Lines] = {}
    for line in lines:
        by.setdefault((line["method"], line["keep"]), {})[line["document"]] = line
    if not by:
        return [Heading(2, name), Paragraph("No result yet.")]
    common = set.intersection(*(set(found) for found in by.values()))
    order = [document for document in next(iter(by.values())) if document in common]
    if not order:
        return [Heading(2, name), Paragraph("No document has been measured with every method yet.")]
    by = {key: {document: by[key][document] for document in order} for key in _ordered(by, recipe)}
    left_out = len({line["document"] for line in lines}) - len(order)
    blocks: list[Block] = [Heading(2, f"{name}, {len(order)} documents")]
    if left_out:
        blocks.append(
            Paragraph(f"{left_out} more have not been measured with every method and are left out.")
        )
    blocks += [_answers(by), _main(by), Heading(3, "Paired comparisons"), _comparisons(by)]
    panels = {
        f"{keep:.0%} kept": {
            method: [line["kl"] for line in found.values()] for (method, k), found in by.items() if k == keep
        }
        for keep in recipe["keeps"]
    }
    svg = curves(f"kl-{name}", panels, chunk=CHUNK, ylabel="KL to the full cache, nats")
    caption = f"{name}: mean KL by distance from the prefix, {CHUNK} tokens a point; shaded: 95 % interval"
    notes = sorted({f"{method} keep={k}: {n}" for (method, k), found in by.items() for n in _notes(found)})
    return [*blocks, Picture(f"kl-{name}", svg, caption), *([Bullets(notes)] if notes else [])]


def _ordered(by: Iterable[tuple[str, float]], recipe: dict[str, Any]) -> list[tuple[str, float]]:
    return sorted(by, key=lambda key: (key[1], recipe["methods"].index(key[0])))


def _notes(found: Lines) -> set[str]:
    return {line["note"] for line in found.values() if line["note"]}


def _main(by: dict[tuple[str, float], Lines]) -> Grid:
    rows = []
    for (method, keep), found in by.items():
        lines = list(found.values())
        whole = [fmean(line["kl"]) for line in lines]
        num_bytes, full = (fmean(line[name] for line in lines) for name in ("bytes", "full_bytes"))
        rows.append(
            [
                method,
                f"{keep:g}",
                f"{fmean(fmean(line['kept']) for line in lines):,.0f}",
                f"{num_bytes / 1e6:,.1f}",
                f"{num_bytes / full:.1%}",
                mean_text(whole),
                milli(median(whole)),
                milli(fmean(near(line["kl"]) for line in lines)),
                milli(fmean(far(line["kl"]) for line in lines)),
                mean_text([fmean(line["dnll"]) for line in lines]),
                f"{fmean(fmean(line['agreement']) for line in lines):.1%}",
            ]
        )
    header = ("method", "keep", "kept", "MB", "of full", "KL x 1000 [95 %]", "median", "near", "far")
    return Grid((*header, "dNLL x 1000 [95 %]", "agreement"), rows)


def pairs(by: dict[tuple[str, float], Lines]) -> list[tuple[str, str, float, str]]:
    """What is compared: method, rival, share, and what the rival is to the method."""
    found = []
    for method, keep in by:
        options, name = _described(by[method, keep])
        for rival, rival_keep in by:
            if rival_keep != keep or rival == method:
                continue
            rival_options, rival_name = _described(by[rival, keep])
            if name == "infokv" and options["alpha"] != 1 and _is_parent(options, rival_name, rival_options):
                found.append((method, rival, keep, "its attention-only parent"))
            if rival_name == "random" and name != "random":
                found.append((method, rival, keep, "chance"))
    return found


def _described(found: Lines) -> tuple[dict[str, Any], str]:
    line = next(iter(found.values()))
    return line["options"], line["name"]


def _is_parent(options: dict[str, Any], rival: str, rival_options: dict[str, Any]) -> bool:
    """Whether the rival scores as this infokv does with alpha = 1."""
    if rival == "infokv":
        return rival_options == {**options, "alpha": 1.0}
    alike = ("keep", "window", "kernel")
    is_plain = (options["heads"], options["reduce"], options["budget"])
    return (
        rival == "snapkv"
        and rival_options["pool"] == "avg"
        and all(rival_options[name] == options[name] for name in alike)
        and is_plain[0] in ("auto", "kv")
        and is_plain[1:] == ("mean", "uniform")
    )


def _comparisons(by: dict[tuple[str, float], Lines]) -> Grid:
    rows = []
    for method, rival, keep, role in pairs(by):
        mine, theirs = by[method, keep], by[rival, keep]
        found = paired(_kl(mine), _kl(theirs))
        rows.append([method, rival, role, f"{keep:g}", _bytes_ratio(mine, theirs), *found.cells])
    header = ("method", "against", "which is", "keep", "bytes of its", *PAIRED_HEADER)
    return Grid(header, rows, num_text=3)


def _kl(found: Lines) -> list[float]:
    return [fmean(line["kl"]) for line in found.values()]


def _bytes_ratio(mine: Lines, theirs: Lines) -> str:
    ratio = sum(line["bytes"] for line in mine.values()) / sum(line["bytes"] for line in theirs.values())
    return "equal" if ratio == 1 else f"{ratio:.1%}"


def _answers(by: dict[tuple[str, float], Lines]) -> Bullets:
    """What the paired comparisons say, in sentences; more only where the bytes are equal."""
    said = []
    for method, rival, keep, role in pairs(by):
        mine, theirs = by[method, keep], by[rival, keep]
        found = paired(_kl(mine), _kl(theirs))
        ratio = _bytes_ratio(mine, theirs)
        at = "equal bytes" if ratio == "equal" else f"{ratio} of its bytes"
        told = verdict(found, "closer to the full cache", "farther from the full cache")
        said.append(f"{method} at keep {keep:g} against {rival} ({role}), {at}: {told} ({found.in_words}).")
    return Bullets(said or ["No method here has its parent or the random control beside it."])
