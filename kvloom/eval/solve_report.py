"""The report of a solve run: right answers teacher-forced and greedy ones judged, rivals paired by task."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from kvloom.eval.comparison import SEED
from kvloom.eval.journal import read_lines, read_run
from kvloom.eval.page import Bullets, Code, Grid, Heading, Paragraph
from kvloom.eval.paired import PAIRED_HEADER, RESAMPLES, mean_text, milli, paired, verdict, write_report
from kvloom.eval.recall import check_baseline
from kvloom.eval.recall_report import points
from kvloom.eval.solve import FULL
from kvloom.eval.statistics import paired_bootstrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvloom.eval.page import Block

Lines = dict[str, dict[str, Any]]
"""Result lines of one method at one share, by task."""

Arms = dict[tuple[str, float], Lines]
Pair = tuple[tuple[str, float], tuple[str, float], str]
"""Method, rival, and what the rival is to it."""

_MEASURES = (
    "Reference: a right answer is run while the compressor drops rows of it. KL: mean over "
    "its tokens of KL(full cache || this cache) of the next token, in thousandths of a nat. dNLL: negative "
    "log-likelihood of the answer per token, less that over the full cache, in thousandths of a nat. "
    "Agreement: share of tokens whose likeliest successor is the full cache's.",
    "Generated: greedy. right: the last number, or the letter, is the data's. Instructions, strict: of a "
    "prompt all, or of all single ones, followed as the response stands; prompts with one that cannot be "
    "checked are left out of the first figure, and it of the second; neither ever counts as followed.",
    "compressed: answers in which rows were dropped at least once, and how often on average over all; an "
    "answer that ends before the interval is the full cache's. of full: bytes of keys and values at the "
    "answer's end, prompt and all, in those of a cache that keeps everything.",
    f"[ ]: 95 % interval, percentile bootstrap over tasks, {RESAMPLES:,} resamples, seed {SEED}; p: "
    "sign-flip test; both paired by task. A difference is claimed where the interval excludes 0 and p is "
    "below 0.05.",
    "keep is the share of generated tokens that is KEPT, besides the last ones, which always are.",
)
_CODE = (
    "Programs that the model wrote stand in results.jsonl; they were not run, and nothing here judges them."
)


def report(folder: Path, baseline: str | None = None) -> Path:
    """Writes ``report.md`` and ``report.html`` into the folder of a run, and returns the page.

    Every method is compared with the `baseline`, a label, too. Raises ``EvalError`` for a folder without a
    run, ``MethodError`` for a baseline that is not in it.
    """
    recipe, lines = read_run(folder, made_by="kvloom solve", mark="decode_methods")
    check_baseline(baseline, recipe["decode_methods"])
    title = f"Answers compressed while they grow: {recipe['model']}"
    blocks: list[Block] = [Heading(1, title), *_setting(recipe), Bullets(_MEASURES)]
    skipped = read_lines(folder / "skipped.jsonl")
    if skipped:
        blocks.append(Paragraph(f"{len(skipped)} tasks do not fit and are left out: {skipped[0]['reason']}"))
    for name in dict.fromkeys(line["benchmark"] for line in lines):
        blocks += _part(name, [line for line in lines if line["benchmark"] == name], baseline)
    return write_report(folder, title, blocks)


def _setting(recipe: dict[str, Any]) -> list[Block]:
    versions = ", ".join(f"{name} {number}" for name, number in recipe["versions"].items())
    data = ", ".join(f"{name} {digest[:12]}" for name, digest in recipe["data"].items())
    prompts = (
        f"prompts compressed by {recipe['prompt_method']}" if recipe["prompt_method"] else "prompts whole"
    )
    said = (
        f"Every {recipe['every']} generated tokens rows are dropped, the last {recipe['recent']} stay; "
        f"{prompts}; greedy answers of at most {recipe['max_new_tokens']} tokens. Model "
        f"{recipe['fingerprint'][:12]}; sets by digest: {data}; kvloom {recipe['kvloom_version']}, "
        f"{versions}."
    )
    return [Paragraph(said), Code("\n".join(recipe["sets"]))]


def _part(name: str, lines: list[dict[str, Any]], baseline: str | None) -> list[Block]:
    by: Arms = {}
    for line in lines:
        by.setdefault((line["method"], line["keep"]), {})[line["sample"]] = line
    common = set.intersection(*map(set, by.values()))
    order = [task for task in next(iter(by.values())) if task in common]
    if not order or (FULL, 1.0) not in by:
        return [Heading(2, name), Paragraph("No task has been measured with every method yet.")]
    by = {key: {task: found[task] for task in order} for key, found in by.items()}
    blocks: list[Block] = [Heading(2, f"{name}, {len(order)} tasks")]
    left_out = len({line["sample"] for line in lines}) - len(order)
    if left_out:
        blocks.append(
            Paragraph(f"{left_out} more have not been measured with every method and are left out.")
        )
    first, compared = lines[0], _pairs(by, baseline)
    if "reference" in first:
        blocks += [Heading(3, "Right answers, teacher-forced"), _told(by, compared), _references(by)]
        blocks.append(_grid(by, compared))
    if "generated" in first:
        blocks += [Heading(3, "Greedy answers"), _generated(by, first["judge"])]
        if first["judge"] == "text":
            blocks.append(Paragraph(_CODE))
        elif first["judge"] == "instructions":
            blocks += _unchecked(by[FULL, 1.0])
        if first["judge"] in _SCORES:
            blocks.append(_score_grid(by, compared, _SCORES[first["judge"]]))
    return blocks


def _pairs(by: Arms, baseline: str | None) -> list[Pair]:
    found: list[Pair] = []
    for mine, lines in by.items():
        one = next(iter(lines.values()))
        for theirs, other_lines in by.items():
            other = next(iter(other_lines.values()))
            if theirs == mine or not one["name"] or not other["name"] or mine[1] != theirs[1]:
                continue
            if _is_parent(one, other):
                found.append((mine, theirs, "its attention-only parent"))
            elif other["name"] == "random" != one["name"]:
                found.append((mine, theirs, "chance"))
            elif theirs[0] == baseline:
                found.append((mine, theirs, "the baseline"))
    return found


def _is_parent(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the other scores as this infokv does with alpha = 1."""
    options, theirs = one["options"], other["options"]
    if one["name"] != "infokv" or options["alpha"] == 1:
        return False
    if other["name"] == "infokv":
        return theirs == {**options, "alpha": 1.0}
    plain = {"heads": ("auto", "layer"), "reduce": ("mean",), "support": ("auto",), "budget": ("uniform",)}
    return other["name"] == "rpc" and all(options[name] in allowed for name, allowed in plain.items())


# --- right answers


def _references(by: Arms) -> Grid:
    rows = []
    for (method, keep), found in by.items():
        looks = [line["reference"] for line in found.values()]
        kl = [look["kl"] for look in looks]
        cut = [look["kl"] for look in looks if look["compressions"]]
        rows.append(
            [
                method,
                f"{keep:g}",
                *_dropped(looks),
                mean_text(kl),
                milli(median(kl)),
                milli(fmean(cut)) if cut else "-",
                mean_text([look["nll"] - look["full_nll"] for look in looks]),
                f"{fmean(look['nll'] for look in looks):.3f}",
                f"{fmean(look['agreement'] for look in looks):.1%}",
            ]
        )
    header = ("method", "keep", *_DROPPED, "KL x 1000 [95 %]", "median", "KL where compressed")
    return Grid((*header, "dNLL x 1000 [95 %]", "NLL, nats", "agreement"), rows)


_DROPPED = ("compressed", "times", "tokens", "MB at the end", "of full")


def _dropped(looks: list[dict[str, Any]]) -> list[str]:
    """How often rows were dropped, of answers how long, and what is left."""
    num_bytes, full = (fmean(look[name] for look in looks) for name in ("bytes", "full_bytes"))
    return [
        f"{sum(look['compressions'] > 0 for look in looks)} of {len(looks)}",
        f"{fmean(look['compressions'] for look in looks):.1f}",
        f"{fmean(look['tokens'] for look in looks):,.0f}",
        f"{num_bytes / 1e6:,.1f}",
        f"{num_bytes / full:.1%}",
    ]


def _kl(found: Lines) -> list[float]:
    return [line["reference"]["kl"] for line in found.values()]


def _nll(found: Lines) -> list[float]:
    return [line["reference"]["nll"] for line in found.values()]


def _grid(by: Arms, compared: list[Pair]) -> Grid:
    rows = []
    for mine, theirs, role in compared:
        for measure, take in (("KL", _kl), ("NLL", _nll)):
            cells = paired(take(by[mine]), take(by[theirs])).cells
            rows.append([mine[0], theirs[0], role, measure, f"{mine[1]:g}", _ratio(by, mine, theirs), *cells])
    return Grid(("method", "against", "which is", "by", "keep", "bytes of its", *PAIRED_HEADER), rows, 4)


def _ratio(by: Arms, mine: tuple[str, float], theirs: tuple[str, float], look: str = "reference") -> str:
    one, other = (sum(line[look]["bytes"] for line in by[key].values()) for key in (mine, theirs))
    return "equal" if one == other else f"{one / other:.1%}"


def _told(by: Arms, compared: list[Pair]) -> Bullets:
    said = []
    for mine, theirs, role in compared:
        found = paired(_kl(by[mine]), _kl(by[theirs]))
        ratio = _ratio(by, mine, theirs)
        at = "equal bytes" if ratio == "equal" else f"{ratio} of its bytes"
        told = verdict(found, "closer to the full cache", "farther from the full cache")
        sentence = f"{mine[0]} at keep {mine[1]:g} against {theirs[0]} ({role}), {at}: {told}"
        words = f"{sentence} ({found.in_words})."
        said.append(words.replace("documents", "tasks").replace("one document", "one task"))
    return Bullets(said or ["No method here has its parent, the random control or a baseline beside it."])


# --- greedy answers


def _correct(found: Lines) -> list[float]:
    return [line["generated"]["correct"] for line in found.values()]


def _prompts_followed(found: Lines) -> list[float]:
    """1 where all instructions are followed, for prompts of which all can be checked."""
    every = [[told for _, told in line["generated"]["instructions"]] for line in found.values()]
    return [float(all(told)) for told in every if None not in told]


def _singles_followed(found: Lines) -> list[float]:
    every = [told for line in found.values() for _, told in line["generated"]["instructions"]]
    return [float(told) for told in every if told is not None]


_SCORES: dict[str, Callable[[Lines], list[float]]] = {
    "number": _correct,
    "letter": _correct,
    "instructions": _prompts_followed,
}


def _share(values: list[float]) -> str:
    if not values:
        return "-"
    found = paired_bootstrap(values, seed=SEED, resamples=RESAMPLES)
    text = f"{found.mean:.1%}"
    return text if len(values) == 1 else f"{text} [{found.low:.1%}, {found.high:.1%}]"


def _generated(by: Arms, judge: str) -> Grid:
    rows = []
    for (method, keep), found in by.items():
        looks = [line["generated"] for line in found.values()]
        row = [method, f"{keep:g}", *_dropped(looks), _pace(looks)]
        row.append(f"{sum(look['finish_reason'] == 'length' for look in looks)} of {len(looks)}")
        if judge in ("number", "letter"):
            row.append(_share(_correct(found)))
        elif judge == "instructions":
            row += [_share(_prompts_followed(found)), _share(_singles_followed(found))]
        rows.append(row)
    marks = {"number": ["right"], "letter": ["right"], "instructions": ["prompts, strict", "single, strict"]}
    header = ["method", "keep", *_DROPPED, "ms a token", "cut off", *marks.get(judge, [])]
    return Grid(header, rows)


def _pace(looks: list[dict[str, Any]]) -> str:
    """Milliseconds a token, of all but the first of each answer."""
    tokens = sum(look["tokens"] - 1 for look in looks if look["tokens"] > 1)
    return f"{1000 * sum(look['decode_s'] for look in looks) / tokens:.0f}" if tokens else "-"


def _unchecked(found: Lines) -> list[Block]:
    """Instructions of which there is no saying, over the full cache; a response decides about some."""
    names = [
        name for line in found.values() for name, told in line["generated"]["instructions"] if told is None
    ]
    if not names:
        return [Paragraph("Every instruction was checked over the full cache.")]
    told = ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names))
    return [Paragraph(f"Unchecked over the full cache: {told}.")]


def _score_grid(by: Arms, compared: list[Pair], take: Callable[[Lines], list[float]]) -> Grid:
    """Differences of the share of right answers, in points; also to the full cache."""
    full = (FULL, 1.0)
    against_full = [(key, full, "nothing dropped") for key in by if key != full]
    rows = []
    for mine, theirs, role in [*against_full, *compared]:
        a, b = _both(by[mine], by[theirs], take)
        cells = [points(a, b), f"{sum(x != y for x, y in zip(a, b, strict=True))} of {len(a)}"] if a else "--"
        ratio = _ratio(by, mine, theirs, "generated")
        rows.append([mine[0], theirs[0], role, f"{mine[1]:g}", ratio, *cells])
    return Grid(("method", "against", "which is", "keep", "bytes of its", "points [95 %]", "differ"), rows, 3)


def _both(
    mine: Lines, theirs: Lines, take: Callable[[Lines], list[float]]
) -> tuple[list[float], list[float]]:
    """The scores of the tasks that both have one of."""
    one, other = [], []
    for task in mine:
        a, b = take({task: mine[task]}), take({task: theirs[task]})
        if a and b:
            one += a
            other += b
    return one, other
