"""The report of a recall run: every method at every share, questions unseen and seen apart, rivals paired by
sample.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvloom.eval.comparison import SEED
from kvloom.eval.fidelity_report import pairs
from kvloom.eval.journal import read_lines, read_run
from kvloom.eval.page import Bullets, Grid, Heading, Paragraph
from kvloom.eval.paired import (
    PAIRED_HEADER,
    RESAMPLES,
    mean_text,
    milli,
    paired,
    verdict,
    write_report,
)
from kvloom.eval.recall import check_baseline
from kvloom.eval.statistics import paired_difference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvloom.eval.page import Block

Lines = dict[str, dict[str, Any]]
"""Result lines of one method at one share, by sample."""

Arms = dict[tuple[str, float], Lines]

_MEASURES = (
    "unseen: the context was compressed before the question was known, and the question run over what was "
    "left; seen: the question was there, protected and in the window. Numbers of the two do not compare: a "
    "seen question tells the method what to keep.",
    "KL: mean over the gold answer's tokens, teacher-forced, of KL(uncompressed cache || this cache); first: "
    "of its first token; both in thousandths of a nat. dNLL: negative log-likelihood of the gold answer per "
    "token, less that over the uncompressed cache, in thousandths of a nat. Agreement: share of the answer's "
    "tokens at which the likeliest one is the uncompressed cache's.",
    f"[ ]: 95 % interval, percentile bootstrap over samples, {RESAMPLES:,} resamples, seed {SEED}; p: "
    "sign-flip test; both paired by sample. A difference is claimed where the interval excludes 0 and p is "
    "below 0.05. KL has heavy tails, so medians stand beside means.",
    "keep is the share of tokens KEPT, of the context if the question is unseen, else of context and "
    "question. Kept and MB: places, mean over layers, and keys and values of the cache that answers, the "
    "question's rows among them. Compress: seconds that scoring and dropping took.",
)


def report(folder: Path, baseline: str | None = None) -> Path:
    """Writes ``report.md`` and ``report.html`` into the folder of a run, and returns the page.

    Every method is compared with the `baseline`, a label, too. Raises ``EvalError`` for a folder without a
    run, ``MethodError`` for a baseline that is not in it.
    """
    recipe, lines = read_run(folder, made_by="kvloom recall", mark="questions")
    check_baseline(baseline, recipe["methods"])
    title = f"Questions over compressed prompts: {recipe['model']}"
    blocks: list[Block] = [Heading(1, title), Bullets([_setting(recipe), *_MEASURES])]
    skipped = read_lines(folder / "skipped.jsonl")
    if skipped:
        blocks.append(
            Paragraph(f"{len(skipped)} samples do not fit and are left out: {skipped[0]['reason']}")
        )
    for name in dict.fromkeys(line["benchmark"] for line in lines):
        for way in recipe["questions"]:
            of_way = [line for line in lines if (line["benchmark"], line["question"]) == (name, way)]
            blocks += part(f"{name}, question {way}", of_way, recipe, baseline)
    return write_report(folder, title, blocks)


def _setting(recipe: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in recipe["versions"].items())
    data = ", ".join(f"{name} {digest[:12]}" for name, digest in recipe["data"].items())
    return (
        f"Model {recipe['fingerprint'][:12]}; sets by digest: {data}; {recipe['prompt_format']}; kvloom "
        f"{recipe['kvloom_version']}, {versions}."
    )


def part(
    title: str, lines: list[dict[str, Any]], recipe: dict[str, Any], baseline: str | None
) -> list[Block]:
    """The blocks of one set and way to ask."""
    by: Arms = {}
    for line in lines:
        by.setdefault((line["method"], line["keep"]), {})[line["sample"]] = line
    wanted = [(method, keep) for keep in recipe["keeps"] for method in recipe["methods"]]
    missing = [key for key in wanted if key not in by]
    common = set.intersection(*map(set, by.values())) if by else set()
    if missing or not common:
        return [Heading(2, title), Paragraph("No sample has been measured with every method yet.")]
    order = [sample for sample in by[wanted[0]] if sample in common]
    by = {key: {sample: by[key][sample] for sample in order} for key in wanted}
    left_out = len({line["sample"] for line in lines}) - len(order)
    blocks: list[Block] = [Heading(2, f"{title}, {len(order)} samples")]
    if left_out:
        blocks.append(
            Paragraph(f"{left_out} more have not been measured with every method and are left out.")
        )
    compared = _pairs(by, baseline)
    blocks += [_answers(by, compared), _main(by), Heading(3, "Paired comparisons"), _grid(by, compared)]
    notes = sorted(
        {f"{method} keep={keep:g}: {n}" for (method, keep), found in by.items() for n in _notes(found)}
    )
    return [*blocks, Bullets(notes)] if notes else blocks


def _notes(found: Lines) -> set[str]:
    """Short: what differs between samples in numbers only is said once."""
    told = [line["note"] for line in found.values() if line["note"]]
    return {f"{told[0]} (so or alike in {len(told)} of {len(found)} samples)"} if told else set()


def _pairs(by: Arms, baseline: str | None) -> list[tuple[str, str, float, str]]:
    """What is compared: method, rival, share, and what the rival is to the method."""
    found = pairs(by)
    told = {(method, rival, keep) for method, rival, keep, _ in found}
    for method, keep in by:
        if baseline not in (None, method) and (method, baseline, keep) not in told:
            found.append((method, str(baseline), keep, "the baseline"))
    return found


def _main(by: Arms) -> Grid:
    is_answered = all("f1" in line for found in by.values() for line in found.values())
    first = next(iter(by.values()))
    rows = [_full_row(list(first.values()), is_answered=is_answered)]
    for (method, keep), found in by.items():
        lines = list(found.values())
        kl = values(found, "kl")
        row = [
            method,
            f"{keep:g}",
            f"{fmean(fmean(line['kept']) for line in lines):,.0f}",
            f"{fmean(values(found, 'bytes')) / 1e6:,.1f}",
            f"{fmean(values(found, 'bytes')) / fmean(values(found, 'full_bytes')):.1%}",
            f"{fmean(values(found, 'compress_s')):.2f}",
            mean_text(kl),
            milli(median(kl)),
            mean_text(values(found, "first_kl")),
            mean_text(_dnll(found)),
            f"{fmean(values(found, 'agreement')):.1%}",
        ]
        rows.append([*row, *_marks(lines, "")] if is_answered else row)
    header = ["method", "keep", "kept", "MB", "of full", "compress s", "KL x 1000 [95 %]", "median"]
    header += ["first KL x 1000 [95 %]", "dNLL x 1000 [95 %]", "agreement"]
    return Grid([*header, *(("F1", "exact", "contains") if is_answered else ())], rows)


def _full_row(lines: list[dict[str, Any]], *, is_answered: bool) -> list[str]:
    tokens = fmean(line["context_tokens"] + line["question_tokens"] for line in lines)
    num_bytes = fmean(line["full_bytes"] for line in lines)
    row = ["uncompressed", "1", f"{tokens:,.0f}", f"{num_bytes / 1e6:,.1f}", "100.0%", "", "0", "0", "0", "0"]
    row.append("100.0%")
    return [*row, *_marks(lines, "full_")] if is_answered else row


def _marks(lines: list[dict[str, Any]], prefix: str) -> list[str]:
    names = ("f1", "exact_match", "contains")
    return [f"{fmean(line[prefix + name] for line in lines):.1%}" for name in names]


def values(found: Lines, name: str) -> list[float]:
    """One number a sample."""
    return [line[name] for line in found.values()]


def _dnll(found: Lines) -> list[float]:
    return [line["nll"] - line["full_nll"] for line in found.values()]


def _grid(by: Arms, compared: list[tuple[str, str, float, str]]) -> Grid:
    """Pairs by KL and by the gold answer's NLL, and by F1 where there are answers."""
    measures: dict[str, Callable[[Lines], list[float]]] = {
        "KL": lambda found: values(found, "kl"),
        "NLL": lambda found: values(found, "nll"),
    }
    is_answered = all("f1" in line for found in by.values() for line in found.values())
    rows = []
    for method, rival, keep, role in compared:
        mine, theirs = by[method, keep], by[rival, keep]
        for measure, take in measures.items():
            cells = paired(take(mine), take(theirs)).cells
            row = [method, rival, role, measure, f"{keep:g}", bytes_ratio(mine, theirs), *cells]
            if is_answered:
                row.append(points(values(mine, "f1"), values(theirs, "f1")) if measure == "KL" else "")
            rows.append(row)
    header = ("method", "against", "which is", "by", "keep", "bytes of its", *PAIRED_HEADER)
    return Grid((*header, *(("F1 points [95 %]",) if is_answered else ())), rows, num_text=4)


def points(a: list[float], b: list[float]) -> str:
    """a - b of shares, in percentage points, with its interval."""
    found = paired_difference(a, b, seed=SEED, resamples=RESAMPLES)
    text = f"{100 * found.mean:+.1f}"
    return text if len(a) == 1 else f"{text} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def bytes_ratio(mine: Lines, theirs: Lines) -> str:
    """The bytes of one in those of the other."""
    ratio = sum(values(mine, "bytes")) / sum(values(theirs, "bytes"))
    return "equal" if ratio == 1 else f"{ratio:.1%}"


def _answers(by: Arms, compared: list[tuple[str, str, float, str]]) -> Bullets:
    """What the paired comparisons say, in sentences."""
    said = []
    for method, rival, keep, role in compared:
        mine, theirs = by[method, keep], by[rival, keep]
        found = paired(values(mine, "kl"), values(theirs, "kl"))
        ratio = bytes_ratio(mine, theirs)
        at = "equal bytes" if ratio == "equal" else f"{ratio} of its bytes"
        told = verdict(found, "closer to the uncompressed cache", "farther from the uncompressed cache")
        words = found.in_words.replace("documents", "samples")
        told = told.replace("documents", "samples").replace("one document", "one sample")
        said.append(f"{method} at keep {keep:g} against {rival} ({role}), {at}: {told} ({words}).")
    return Bullets(said or ["No method here has its parent, the random control or a baseline beside it."])
