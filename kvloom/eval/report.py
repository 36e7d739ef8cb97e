"""Report: run folders as one Markdown file and one self-contained HTML page, with tables and plots.

`kvloom.eval.runs` reads and merges the folders, `kvloom.eval.comparison` computes the numbers,
`kvloom.eval.facts` and `kvloom.eval.results` put them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.errors import EvalError
from kvloom.eval import plots
from kvloom.eval.comparison import SEED
from kvloom.eval.facts import facts
from kvloom.eval.page import Bullets, Heading, Picture, to_html, to_markdown
from kvloom.eval.results import Results
from kvloom.eval.runs import merge, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.eval.page import Block
    from kvloom.eval.runs import Section

_LEGEND = (
    "KL gap closed: share of the distance to full prefill that a method closes, 0 % where nothing is "
    "recomputed (none), 100 % where everything is (full); KL(full prefill || method) in nats over the gold "
    "answer's tokens, teacher-forced, summed over samples; beside it the same for the first answer token "
    "alone. [ ]: 95 % interval, percentile bootstrap over samples, the same resamples for none and method, "
    f"10,000 of them, seed {SEED}.",
    "KL, NLL: mean nats per token of the gold answer. Agreement: share of gold positions at which the "
    "likeliest token is full prefill's. F1, EM: of the greedy answer; contains: share of samples in which it "
    "contains a gold answer.",
    "Cost: means over samples of context rows recomputed (share of the context's) and of token-layers, which "
    "are rows x layers computed for the question, scoring and check layers included; of full's: share of "
    "full prefill's token-layers.",
    "TTFT / full's: median over samples of the time to first token, relative to full prefill of the same "
    "sample in the same run; blank where full was not run with it. TTFT ms: medians, which need not add up. "
    "KV MB: of the cache that answered. Times of different folders may be of different machines.",
    "Only samples that every method in a table has are in it.",
)


@dataclass(frozen=True)
class Report:
    """A report that was written: its Markdown text, the HTML page, and the plots as SVG by name."""

    markdown: str
    html: Path
    plots: dict[str, str]


def report(folders: Sequence[Path], out: Path | None = None, *, baseline: str | None = None) -> Report:
    """Writes ``report.md`` and ``report.html`` into `out`, or into the first folder.

    `baseline` names the method, by label, that the paired tests are against; by default the `infoflow` entry
    of the lowest KL. Raises ``EvalError`` for a folder without a run, an unknown baseline, a missing
    matplotlib.
    """
    if not folders:
        raise EvalError("there is nothing to report; name the folder of a run")
    plots.require_matplotlib()
    runs = [read(folder) for folder in {Path(folder).resolve(): Path(folder) for folder in folders}.values()]
    sections = merge(runs)
    if baseline is not None:
        _check_baseline(baseline, sections)
    title = "Evaluation of " + ", ".join(dict.fromkeys(run.recipe.model for run in runs))
    blocks: list[Block] = [Heading(1, title), Bullets(_LEGEND)]
    for number, section in enumerate(sections, 1):
        prefix = f"{number}-" if len(sections) > 1 else ""
        blocks += [*facts(section), *Results(section, prefix, baseline).blocks()]
    folder = folders[0] if out is None else out
    page, markdown = folder / "report.html", to_markdown(blocks, "report.html")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(to_html(title, blocks), encoding="utf-8")
        (folder / "report.md").write_text(markdown, encoding="utf-8")
    except OSError as error:
        raise EvalError(f"cannot write the report into {str(folder)!r}: {error.strerror}") from error
    drawn = {block.name: block.svg for block in blocks if isinstance(block, Picture)}
    return Report(markdown, page, drawn)


def _check_baseline(baseline: str, sections: Sequence[Section]) -> None:
    entries = [entry for section in sections for table in section.tables.values() for entry in table]
    if not any(entry.is_called(baseline) for entry in entries):
        known = ", ".join(dict.fromkeys(label for entry in entries for label in entry.labels))
        raise EvalError(f"the baseline {baseline!r} is not in the results; there are: {known}")
