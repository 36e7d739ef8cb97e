"""The report of a Forward Influence run: answers computed from the numbers, tables, curves by distance."""

from __future__ import annotations

from math import isnan
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvloom.eval import plots
from kvloom.eval.comparison import SEED
from kvloom.eval.continuations import far, near
from kvloom.eval.influence import SINGLE
from kvloom.eval.influence_numbers import (
    PREDICTORS,
    by_label,
    crossing,
    crossing_text,
    reach,
    regression,
    without_largest,
)
from kvloom.eval.influence_sets import CELLS, NOTHING, THIRDS
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
    from pathlib import Path

    from kvloom.eval.page import Block
    from kvloom.eval.paired import Curves
    from kvloom.eval.statistics import Interval

Lines = dict[str, dict[str, dict[str, Any]]]
"""Result lines by set of removed rows, then by document, in one order of documents for all."""

RIVALS = ("attention-last", "attention", "attention-head", "sum", "random", "random-mass", "low-entropy")
RIVALS += ("value-norm", "keydiff", "recent")
DISTANCES = {"near": near, "far": far}

_MEASURES = (
    f"Influence: mean KL(full cache || cache without the rows) of the next token, in thousandths of a nat; "
    f"near: the first {NEAR} tokens after the prefix, far: the second half of the continuation; both fixed "
    "beforehand. Reach: far over near, a ratio of means.",
    "dNLL: log-likelihood of the text's own next token that is lost, in thousandths of a nat.",
    "Position: mean place of the removed rows in the prefix. Attention: what the rows held of the attention "
    "of the prefix's last queries, where they were removed, mean over all layers and heads.",
    "matched: all sets share one histogram of positions (16 bins). early, middle, late: removed in that "
    "third of the layers only. nothing, permuted: no row is removed, the noise floor.",
    f"[ ]: 95 % interval, percentile bootstrap over documents, {RESAMPLES:,} resamples, seed {SEED}; p: "
    "sign-flip test; both paired by document. A difference is claimed where the interval excludes 0 and p is "
    "below 0.05. KL has heavy tails, so medians stand beside means.",
)


def report(folder: Path) -> Path:
    """Writes ``report.md`` and ``report.html`` into the folder of a run, and returns the page.

    Raises ``EvalError`` for a folder without a run, and without matplotlib.
    """
    plots.require_matplotlib()
    recipe, lines = read_run(folder, made_by="kvloom influence", mark="removed")
    title = f"Forward influence of cached tokens: {recipe['model']}"
    blocks: list[Block] = [Heading(1, title), Bullets([_setting(recipe), *_MEASURES])]
    for name in recipe["sets"]:
        blocks += _set_blocks(name, [line for line in lines if line["set"] == name], recipe)
    return write_report(folder, title, blocks)


def _setting(recipe: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in recipe["versions"].items())
    return (
        f"{recipe['documents']} documents of each text set: rows are removed from the exact cache of a "
        f"prefix of {recipe['prefix']:,} tokens, {recipe['continuation']:,} tokens after it are run. The "
        f"first 4 rows and the last {recipe['window']} are never removed. Model "
        f"{recipe['fingerprint'][:12]}; kvloom {recipe['kvloom_version']}, {versions}."
    )


def _set_blocks(name: str, lines: list[dict[str, Any]], recipe: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [Heading(2, name)]
    singles = [line for line in lines if line["removed"].startswith(SINGLE)]
    floor = [line for line in lines if line["removed"] in NOTHING]
    of_rows = [line for line in lines if line["share"]]  # the others have none
    for share in recipe["shares"]:
        wanted = [line for line in of_rows if line["share"] == share] + floor
        effects = {
            effect: _by_set([line for line in wanted if line["effect"] == effect], recipe["removed"])
            for effect in recipe["effects"]
        }
        for effect, found in effects.items():
            blocks += _effect_blocks(name, f"{share:.1%} of the rows, {effect} effect", found)
        if all(effects.get(effect) for effect in ("total", "direct")):
            blocks += [Heading(4, "Total and direct effect"), _direct_share(effects)]
    for effect in recipe["effects"]:
        blocks += _single_blocks([line for line in singles if line["effect"] == effect], effect)
    return blocks


def _by_set(lines: list[dict[str, Any]], order: list[str]) -> Lines:
    """The lines by set, of the documents that every set has been measured on."""
    found: Lines = {}
    for line in lines:
        found.setdefault(line["removed"], {})[line["document"]] = line
    if not found:
        return {}
    common = set.intersection(*(set(by_document) for by_document in found.values()))
    documents = [document for document in next(iter(found.values())) if document in common]
    if not documents:
        return {}
    return {
        label: {document: found[label][document] for document in documents}
        for label in order
        if label in found
    }


def _kl(found: Lines, label: str, distance: str = "") -> list[float]:
    """By document: the mean over all, near or far tokens."""
    of = DISTANCES.get(distance, fmean)
    return [of(line["kl"]) for line in found[label].values()]


def _effect_blocks(name: str, what: str, found: Lines) -> list[Block]:
    if not found:
        return [Heading(3, what), Paragraph("No document has been measured with every set yet.")]
    number = len(next(iter(found.values())))
    every: Curves = {label: [line["kl"] for line in by.values()] for label, by in found.items()}
    panels = {
        "as they are": {label: c for label, c in every.items() if ":" not in label},
        "matched by position": {label: c for label, c in every.items() if label.endswith(":matched")},
        **{
            third: {label: c for label, c in every.items() if label.endswith(f":{third}")} for third in THIRDS
        },
    }
    panels = {title: held for title, held in panels.items() if held}
    key = "".join(part if part.isalnum() else "-" for part in f"{name}-{what}")
    svg = curves(key, panels, chunk=CHUNK, ylabel="KL to the full cache, nats")
    caption = f"{name}, {what}: mean influence by distance, {CHUNK} tokens a point; shaded: 95 % interval"
    return [
        Heading(3, f"{what}, {number} documents"),
        Bullets(answers(found)),
        _main(found),
        Heading(4, "Entropy against its rivals, and low entropy against chance"),
        _comparisons(found),
        Heading(4, "From which token on entropy's influence is the larger, to the end"),
        _crossings(found, every),
        Heading(4, "Far influence of every document, x 1000"),
        _documents(found),
        Picture(key, svg, caption),
    ]


def answers(found: Lines) -> list[str]:
    """What the numbers say, in sentences."""
    said, number = [], len(next(iter(found.values())))
    for suffix, how in (("", ""), (":matched", ", position-matched")):
        entropy = f"entropy{suffix}"
        if entropy not in found:
            continue
        for rival, role in (
            ("attention-last", "the paper's attention"),
            ("attention", "attention over all layers"),
            ("attention-head", "attention as real methods use it"),
            ("random", "chance"),
            ("random-mass", "rows of equal attention"),
        ):
            label = rival + suffix
            if label in found:
                said.append(_against(found, entropy, label, f"High entropy against {role}{how}"))
        low, chance = f"low-entropy{suffix}", f"random{suffix}"
        if low in found and chance in found:
            said.append(_against(found, low, chance, f"Low entropy against chance{how}"))
    if "entropy" in found and number > 1:
        share, rest = without_largest(_kl(found, "entropy", "far"))
        said.append(
            f"One document has {share:.0%} of entropy's far influence summed over {number}; without it the "
            f"mean is {milli(rest)}."
        )
    floor = [max(_kl(found, label)) for label in NOTHING if label in found]
    if floor:
        said.append(f"Noise floor: removing nothing changes predictions by {milli(max(floor))} at most.")
    return said


def _against(found: Lines, label: str, rival: str, what: str) -> str:
    parts = []
    for distance in DISTANCES:
        told = paired(_kl(found, label, distance), _kl(found, rival, distance))
        parts.append(
            f"{distance}: {verdict(told, 'smaller', 'larger')} ({milli(fmean(_kl(found, label, distance)))} "
            f"and {milli(fmean(_kl(found, rival, distance)))}; {told.in_words})"
        )
    return f"{what}: {'; '.join(parts)}."


def _main(found: Lines) -> Grid:
    rows = []
    for label, by in found.items():
        lines = list(by.values())
        removed, mass = fmean(line["num_removed"] for line in lines), fmean(line["mass"] for line in lines)
        nearest = _kl(found, label, "near")
        ratio = reach([line["kl"] for line in lines])
        rows.append(
            [
                label,
                f"{removed:,.0f}",
                f"{fmean(line['mean_position'] for line in lines):,.0f}" if removed else "-",
                f"{mass:.1%}",
                mean_text(nearest),
                milli(median(nearest)),
                mean_text(_kl(found, label, "far")),
                milli(median(_kl(found, label, "far"))),
                _plain(ratio.mean)
                + (f" [{_plain(ratio.low)}, {_plain(ratio.high)}]" if ratio.low == ratio.low else ""),
                milli(fmean(nearest) / mass) if mass else "-",
                mean_text([near(line["dnll"]) for line in lines]),
                mean_text([far(line["dnll"]) for line in lines]),
            ]
        )
    header = ("removed", "rows", "position", "attention", "near x 1000 [95 %]", "median")
    more = ("far x 1000 [95 %]", "median", "reach [95 %]", "near / attention", "dNLL near", "dNLL far")
    return Grid((*header, *more), rows)


def _ratio(interval: Interval) -> str:
    ends = "" if isnan(interval.low) else f" [{_plain(interval.low)}, {_plain(interval.high)}]"
    return _plain(interval.mean) + ends


def _plain(value: float) -> str:
    return "-" if isnan(value) else f"{value:.2f}"


def _comparisons(found: Lines) -> Grid:
    pairs = [
        (f"entropy{suffix}", f"{rival}{suffix}")
        for suffix in ("", ":matched", *(f":{third}" for third in THIRDS))
        for rival in RIVALS
    ]
    pairs += [("low-entropy", "random"), ("low-entropy:matched", "random:matched")]
    rows = []
    for label, rival in pairs:
        if label in found and rival in found:
            for distance in DISTANCES:
                told = paired(_kl(found, label, distance), _kl(found, rival, distance))
                rows.append([label, rival, distance, verdict(told, "smaller", "larger"), *told.cells])
    return Grid(("removed", "against", "where", "it is", *PAIRED_HEADER), rows, num_text=4)


def _crossings(found: Lines, every: Curves) -> Grid:
    rows = []
    for suffix in ("", ":matched"):
        mine = f"entropy{suffix}"
        if mine not in found:
            continue
        for label, theirs in by_label(every, [f"{rival}{suffix}" for rival in RIVALS]).items():
            told = crossing(every[mine], theirs, CHUNK)
            rows.append([mine, label, crossing_text(told, len(theirs))])
    return Grid(("removed", "against", "larger [95 %]"), rows, num_text=3)


def _documents(found: Lines) -> Grid:
    documents = list(next(iter(found.values())))
    rows = [[label, *(milli(value) for value in _kl(found, label, "far"))] for label in found]
    return Grid(("removed", *documents), rows)


def _direct_share(effects: dict[str, Lines]) -> Grid:
    """How much of the total effect a chunk sees of itself; the rest was copied forward in between."""
    total, direct = effects["total"], effects["direct"]
    rows = []
    for label in total:
        if label in direct and label not in NOTHING:
            common = total[label].keys() & direct[label].keys()
            cells = []
            for of in DISTANCES.values():
                sums = [fmean(of(held[label][d]["kl"]) for d in sorted(common)) for held in (total, direct)]
                cells += [milli(sums[0]), milli(sums[1]), f"{sums[1] / sums[0]:.0%}" if sums[0] else "-"]
            rows.append([label, *cells])
    header = [f"{where} {what}" for where in DISTANCES for what in ("total", "direct", "direct of total")]
    return Grid(("removed", *header), rows)


def _single_blocks(singles: list[dict[str, Any]], effect: str) -> list[Block]:
    if not singles:
        return []
    cells = []
    for cell in CELLS:
        lines = [line for line in singles if line["cell"] == cell]
        if lines:
            texts = []
            for of in DISTANCES.values():
                values = [of(line["kl"]) for line in lines]
                texts += [milli(fmean(values)), milli(median(values))]
            cells.append([cell, f"{len(lines)}", *texts])
    blocks: list[Block] = [
        Heading(3, f"Single rows, {effect} effect"),
        Grid(("row has", "rows", "near x 1000", "median", "far x 1000", "median"), cells),
    ]
    fits = {where: regression(singles, of) for where, of in DISTANCES.items()}
    if any(fit is None for fit in fits.values()):
        return [*blocks, Paragraph("Too few single rows to tell what their influence goes with.")]
    rows = []
    for place, predictor in enumerate(PREDICTORS):
        held = [fit[place] for fit in fits.values() if fit is not None]
        rows.append([predictor, *map(_ratio, held)])
    what = (
        "Change of the logarithm of influence per standard deviation of each predictor, the others held, "
        "within documents; 95 % interval over documents."
    )
    return [*blocks, Paragraph(what), Grid(("predictor", *DISTANCES), rows)]
