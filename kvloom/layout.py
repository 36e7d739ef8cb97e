"""Layout: where chunks stand. Order, first positions, and the position of the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Layout:
    """First position of each chunk, in context order, and the position at which the question begins."""

    starts: tuple[int, ...]
    next_position: int


def contiguous(num_header: int, lengths: Sequence[int]) -> Layout:
    """Header, then the chunks one after another, then the question: the positions of a full prefill."""
    starts = [num_header]
    for length in lengths:
        starts.append(starts[-1] + length)
    return Layout(tuple(starts[:-1]), starts[-1])
