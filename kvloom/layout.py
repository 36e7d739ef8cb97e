"""Layout: where chunks stand. First positions of the chunks, and the position of the question.

The four geometries of the InfoFlow KV paper's Table 1, by the names of its figure (HL head local, TL tail
local, HP and TP the question at the head or the tail), for N context tokens behind a header of P, chunk
lengths len_i, the longest Lmax:

    global   chunk i at the sum of the lengths before it, question at P + N: the positions of a full prefill
    hl-hp    every chunk at P, question at P + Lmax: right after the longest chunk
    hl-tp    every chunk at P, question at P + N
    tl-tp    every chunk ends at P + N, question at P + N
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Layout:
    """First position of each chunk, in context order, and the position at which the question begins."""

    starts: tuple[int, ...]
    next_position: int


def _global(num_header: int, lengths: Sequence[int]) -> Layout:
    starts = [num_header]
    for length in lengths:
        starts.append(starts[-1] + length)
    return Layout(tuple(starts[:-1]), starts[-1])


def _heads_then_question(num_header: int, lengths: Sequence[int]) -> Layout:
    return Layout((num_header,) * len(lengths), num_header + max(lengths, default=0))


def _heads_and_far_question(num_header: int, lengths: Sequence[int]) -> Layout:
    return Layout((num_header,) * len(lengths), num_header + sum(lengths))


def _tails(num_header: int, lengths: Sequence[int]) -> Layout:
    end = num_header + sum(lengths)
    return Layout(tuple(end - length for length in lengths), end)


LAYOUTS: dict[str, Callable[[int, Sequence[int]], Layout]] = {
    "global": _global,
    "hl-hp": _heads_then_question,
    "hl-tp": _heads_and_far_question,
    "tl-tp": _tails,
}
"""Layout by name, from the number of header tokens and the chunks' lengths."""

ORDERING = "hl-tp"
"""The layout in which documents are compared for reordering: all at the head, the question at the tail
(section 5 of the InfoFlow KV paper).
"""
