"""Page: blocks of text, tables and plots, as Markdown and as one HTML file that needs nothing else.

All text in blocks is plain: both forms escape it, so that what a data file or a method's name holds is shown
and never interpreted. The HTML file asks for nothing over the network and follows the reader's light or dark
scheme.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A sentence or more."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """Remarks, one a line."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Lines to copy."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table. The first `num_text` columns are words, the others numbers, shown to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1


@dataclass(frozen=True)
class Picture:
    """A plot; Markdown says where it is."""

    name: str
    svg: str
    caption: str


Block = Heading | Paragraph | Bullets | Code | Grid | Picture


def to_markdown(blocks: Sequence[Block], page: str) -> str:
    """The blocks as GitHub's Markdown; `page` is the HTML file that holds the plots."""
    return "\n\n".join(_markdown(block, page) for block in blocks) + "\n"


def _markdown(block: Block, page: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Bullets(texts):
            return "\n".join(f"- {_plain(text)}" for text in texts)
        case Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}\n{text}\n{fence}"
        case Grid(header, rows, num_text):
            rule = ["---" if place < num_text else "---:" for place in range(len(header))]
            lines = [
                [_plain(cell) for cell in header],
                rule,
                *([_plain(cell) for cell in row] for row in rows),
            ]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Picture(name, _, caption):
            return f"Plot `{_plain(name)}` in {_plain(page)}: {_plain(caption)}"


def _plain(text: str) -> str:
    """`text` on one line, so that Markdown shows it as it is."""
    text = re.sub(r"[\\`*|<>]|(?<=\])\(|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], text)
    return " ".join(text.replace("&", "&amp;").split())


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """The blocks as one HTML page."""
    anchors = {
        place: f"part-{place}"
        for place, block in enumerate(blocks)
        if isinstance(block, Heading) and block.level > 1
    }
    links = "".join(
        f'<li class="level{block.level}"><a href="#{anchors[place]}">{escape(block.text)}</a></li>'
        for place, block in enumerate(blocks)
        if isinstance(block, Heading) and place in anchors
    )
    body = [_html(block, anchors.get(place)) for place, block in enumerate(blocks)]
    nav = f"<nav><ul>{links}</ul></nav>" if len(anchors) > 2 else ""
    body.insert(1, nav)
    return to_page(title, "\n".join(body))


def to_page(title: str, body: str, style: str = "") -> str:
    """A whole HTML page of this look around `body`, with more `style`."""
    return _PAGE.format(title=escape(title), style=_STYLE + style, body=body)


def _html(block: Block, anchor: str | None) -> str:
    match block:
        case Heading(level, text):
            mark = f' id="{anchor}"' if anchor else ""
            return f"<h{level}{mark}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(texts):
            return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Grid():
            return _html_grid(block)
        case Picture(name, svg, caption):
            drawing = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
            below = f"<figcaption>{escape(caption)}</figcaption>"
            return f'<figure id="plot-{escape(name)}">{drawing}{below}</figure>'


def _html_grid(grid: Grid) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        marked = (
            f"<{tag}{'' if place < grid.num_text else ' class=n'}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "\n".join(line(row, "td") for row in grid.rows)
    head = line(grid.header, "th")
    return f'<div class="wide"><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #5f6b7a; --line: #d5dbe1; --paper: #ffffff;
  --band: #f4f6f8; --link: #1d5fa8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e8ee; --faint: #9aa7b5; --line: #38424e; --paper: #14181d; --band: #1c2229;
    --link: #7fb4ee }
}
body { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 1500px;
  margin: 0 auto; padding: 1.5rem }
h1, h2, h3, h4 { line-height: 1.2; margin: 2rem 0 .6rem }
h2 { border-top: 2px solid var(--line); padding-top: 1.2rem }
p, ul { max-width: 75rem } a { color: var(--link) }
nav ul { list-style: none; padding: 0; columns: 3 18rem } nav .level3 { padding-left: 1.2rem }
nav .level4 { display: none }
pre { background: var(--band); padding: .7rem; overflow-x: auto; border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere }
.wide { overflow-x: auto; margin: .6rem 0 1.2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { border-bottom: 2px solid var(--line); vertical-align: bottom; min-width: 3.2rem }
th.n, td.n { text-align: right } td.n { white-space: nowrap }
tbody tr:nth-child(even) { background: var(--band) }
td { overflow-wrap: break-word; max-width: 60rem } td:first-child { white-space: nowrap }
figure { margin: 1rem 0 2rem } figure svg { max-width: 100%; height: auto }
figcaption { color: var(--faint); font-size: 13px; max-width: 60rem }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
