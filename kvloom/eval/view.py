"""View: what methods see in the documents of one question, as one HTML page that needs nothing else.

Each token of the passages is shaded by its score, the recomputed ones are underlined, and those that are
exact already are grey. A panel for each method; no script, readable in light and dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import kvloom
from kvloom.errors import MethodError
from kvloom.eval.page import to_page
from kvloom.eval.tables import percent
from kvloom.probe import Probe
from kvloom.selectors import select
from kvloom.tokenizer import StreamDecoder
from kvloom.trace import Trace, as_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvloom.answer_options import Reorder
    from kvloom.loom import Loom
    from kvloom.prompt import Document, Prompt
    from kvloom.selectors import Selector
    from kvloom.tokenizer import Tokenizer

NUM_SHADES = 10
FULL_SHADE = 98
"""The percentile of the scores that gets the darkest shade: a few scores far above all others would leave
the rest white.
"""


@dataclass(frozen=True)
class Panel:
    """What one method makes of the prompt. Rows count from the header's first token, in the order read."""

    recipe: str  # for people
    exact_recipe: str
    prompt: Prompt  # as read
    order: list[int]  # of the chunks as given
    exact: list[bool]  # by row: its KV is that of a full prefill already
    scores: list[float]  # by row
    rows: list[int]  # recomputed, ascending

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, without the scores; rows are as `as_ranges` writes them."""
        return {
            "method": self.exact_recipe,
            "context_tokens": len(self.exact),
            "exact_rows": sum(self.exact),
            "recomputed_rows": len(self.rows),
            "rows": as_ranges(self.rows),
            "chunk_order": self.order,
        }


def look(loom: Loom, prompt: Prompt, selector: Selector, reorder: Reorder = False) -> Panel:
    """The scores and the choice of the selector; missing chunks are computed and stored.

    Raises ``MethodError`` for a selector that chooses nothing, and as the loom's `splice` and `reorder` do.
    """
    if not selector.reuses:
        raise MethodError(
            f"{selector.name} computes every row, so there is no choice to look at; name another selector"
        )
    exact_recipe, trace = repr(selector), Trace()
    order = list(range(len(prompt.chunk_ids)))
    if reorder:
        prompt = loom.reorder(prompt, selector, by="documents" if reorder is True else reorder, trace=trace)
        order, exact_recipe = trace.chunk_order, f"{exact_recipe} reorder={reorder}"
    probe = Probe(
        loom.decoder,
        loom.splice(prompt, placement=selector.placement),
        prompt.question_ids,
        prompt.question_span,
        respliced=lambda geometry: loom.splice(prompt, placement=geometry),
    )
    rows = select(selector, probe)
    compressed = "" if loom.chunk_compressor is None else f" @ {loom.chunk_compressor!r}"
    return Panel(
        recipe=f"{selector.recipe}{' reordered' if reorder else ''}{compressed}",
        exact_recipe=exact_recipe + compressed,
        prompt=prompt,
        order=order,
        exact=probe.exact.tolist(),
        scores=selector.score(probe).tolist(),
        rows=rows.tolist(),
    )


class Piece(NamedTuple):
    """A text, and the tokens that it takes: several where a character does not end with a token."""

    text: str
    tokens: list[int]  # places in the ids


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Piece]:
    """The text of the ids token by token; the pieces joined are the `decode` of all."""
    decoder, found, open_tokens = StreamDecoder(tokenizer, skip_special=False), [], []
    for place, token_id in enumerate(ids):
        open_tokens.append(place)
        if text := decoder.feed(token_id):
            found.append(Piece(text, open_tokens))
            open_tokens = []
    rest = decoder.flush()
    if found and not (rest and open_tokens):
        last = found.pop()
        rest, open_tokens = last.text + rest, last.tokens + open_tokens
    return [*found, Piece(rest, open_tokens)] if open_tokens else found


def page(
    question: str,
    documents: Sequence[Document],
    panels: Sequence[Panel],
    tokenizer: Tokenizer,
    *,
    model: str,
    answers: Sequence[str] = (),
    supporting: Sequence[int] = (),
) -> str:
    """The HTML page; `answers` and `supporting` passages are those of a benchmark's sample."""
    drawn = "\n".join(_panel(panel, documents, tokenizer, supporting) for panel in panels)
    gold = f"<p>Gold answer: {shown(' / '.join(answers))}</p>" if answers else ""
    number = f"{len(documents):,} passage{'' if len(documents) == 1 else 's'}"
    about = f"kvloom {kvloom.__version__}, {model}; {number}"
    body = (
        f"<h1>{shown(question)}</h1>\n{gold}<p class=about>{shown(about)}</p>\n{_LEGEND}\n"
        f'<div class="panels">\n{drawn}\n</div>'
    )
    return to_page(question, body, _STYLE)


def _panel(
    panel: Panel, documents: Sequence[Document], tokenizer: Tokenizer, supporting: Sequence[int]
) -> str:
    shading = _Shading(panel)
    prompt = panel.prompt
    header = "".join(_spans(tokenizer, prompt.header_ids.tolist(), 0, shading))
    parts = [
        f"<details><summary>header, {len(prompt.header_ids):,} rows</summary>"
        f'<div class="text">{header}</div></details>'
        if len(prompt.header_ids)
        else ""
    ]
    names = _names(panel)
    for place, span in enumerate(prompt.spans):
        document = prompt.chunk_documents[place]
        held = documents[document]
        mark = ' <b class="gold">gold</b>' if document in supporting else ""
        title = f"{names[place]}. {held.title or held.id or ''}".strip()
        text = "".join(_spans(tokenizer, prompt.chunk_ids[place].tolist(), span.start, shading))
        parts.append(
            f"<h3>{shown(title)}{mark} <small>rows {span.start:,} to {span.stop - 1:,}, "
            f"{sum(span.start <= row < span.stop for row in panel.rows):,} recomputed</small></h3>"
            f'<div class="text">{text}</div>'
        )
    num_rows, num_candidates = len(panel.exact), panel.exact.count(False)
    facts = (
        f"{len(panel.rows):,} of {num_rows:,} context rows recomputed "
        f"({percent(len(panel.rows) / num_rows)}), out of {num_candidates:,} that are not exact already. "
        f"Scores from {shading.low:.3g} to {shading.high:.3g}, the darkest at {shading.dark:.3g}."
    )
    if panel.order != sorted(panel.order):
        facts += f" Read in the order {', '.join(names)} of the passages as given."
    return (
        f"<section><h2>{shown(panel.recipe)}</h2><p>{facts}</p><pre>{shown(panel.exact_recipe)}</pre>"
        f"{''.join(parts)}</section>"
    )


def _names(panel: Panel) -> list[str]:
    """Each chunk as read by the number of its document as given, with that of the part where there are
    several: ``3``, ``1.2``.
    """
    given = {chunk: place for place, chunk in enumerate(panel.order)}
    documents = [panel.prompt.chunk_documents[given[chunk]] for chunk in sorted(given)]
    names = [""] * len(documents)
    for chunk, document in enumerate(documents):
        part = f".{documents[: chunk + 1].count(document)}" if documents.count(document) > 1 else ""
        names[given[chunk]] = f"{document + 1}{part}"
    return names


class _Shading:
    """How a row looks, and what is said of it."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        candidates = [row for row, is_exact in enumerate(panel.exact) if not is_exact]
        ranked = sorted(candidates, key=lambda row: -panel.scores[row])
        self.ranks = {row: rank for rank, row in enumerate(ranked, 1)}
        self.chosen = set(panel.rows)
        finite = [panel.scores[row] for row in candidates if isfinite(panel.scores[row])] or [0.0]
        self.low, self.high = min(finite), max(finite)
        self.dark = float(np.percentile(finite, FULL_SHADE))

    def shade(self, rows: Sequence[int]) -> int:
        """0 to ``NUM_SHADES``, of the highest score; 0 where all are exact, or score the same."""
        scores = [self.panel.scores[row] for row in rows if row in self.ranks]
        if not scores or self.dark <= self.low:
            return 0
        share = (max(scores) - self.low) / (self.dark - self.low)
        return round(NUM_SHADES * min(max(share, 0.0), 1.0))

    def says(self, row: int) -> str:
        if row not in self.ranks:
            return f"row {row:,}, exact already"
        score = f"row {row:,}, score {self.panel.scores[row]:.4g}"
        rank = f"rank {self.ranks[row]:,} of {len(self.ranks):,}"
        return f"{score}, {rank}{', recomputed' if row in self.chosen else ''}"


def _spans(tokenizer: Tokenizer, ids: Sequence[int], first: int, shading: _Shading) -> Iterator[str]:
    """A tag for each piece of the ids, whose first is row `first`."""
    for text, places in pieces(tokenizer, ids):
        rows = [first + place for place in places]
        shade = shading.shade(rows)
        classes = [f"s{shade}"] if shade else []
        if all(row not in shading.ranks for row in rows):
            classes.append("exact")
        if any(row in shading.chosen for row in rows):
            classes.append("new")
        mark = f' class="{" ".join(classes)}"' if classes else ""
        said = "; ".join(map(shading.says, rows))
        yield f'<i{mark} title="{shown(repr(text))}: {said}">{shown(text)}</i>'


def shown(text: str) -> str:
    """`text` for HTML, every character of it to be seen: control characters as their pictures."""
    pictures = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
    return escape(text.translate(pictures))


_SHADES = "\n".join(
    f"i.s{shade} {{ background: rgb(var(--heat) / {shade / NUM_SHADES * 0.75:.3f}) }}"
    for shade in range(1, NUM_SHADES + 1)
)
_STYLE = f"""
:root {{ --heat: 222 120 20; --mark: #1550a8; --dim: #717b87 }}
@media (prefers-color-scheme: dark) {{ :root {{ --heat: 224 122 30; --mark: #8cc4ff; --dim: #8791a0 }} }}
body {{ max-width: none }}
.about, small {{ color: var(--faint); font-weight: normal }}
.panels {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 2rem }}
section {{ min-width: 0 }}
h2 {{ font-size: 1.15rem }} h3 {{ font-size: .95rem; margin: 1.1rem 0 .3rem }}
.text {{ white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75 }}
.gold {{ color: var(--mark) }}
i {{ font-style: normal; border-bottom: 3px solid transparent }}
i.new {{ border-bottom-color: var(--mark) }}
i.exact {{ color: var(--dim) }}
.legend i {{ padding: .1rem .35rem }}
{_SHADES}
"""
_SCALE = "".join(f'<i class="s{shade}">&nbsp;</i>' if shade else "<i>&nbsp;</i>" for shade in range(11))
_LEGEND = (
    f'<p class="legend">{_SCALE} score, from the lowest of a panel to its {FULL_SHADE}th percentile '
    '&nbsp; <i class="new">recomputed</i> &nbsp; <i class="exact">exact already, not to choose from</i> '
    "&nbsp; Hold the pointer over a token for its row, score and rank.</p>"
)
