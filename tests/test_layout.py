from __future__ import annotations

import pytest

from kvloom.layout import LAYOUTS, Layout


@pytest.mark.parametrize(
    ("name", "starts", "next_position"),
    [
        ("global", (10, 13, 20), 22),
        ("hl-hp", (10, 10, 10), 17),
        ("hl-tp", (10, 10, 10), 22),
        ("tl-tp", (19, 15, 20), 22),
    ],
)
def test_layouts_by_hand(name: str, starts: tuple[int, ...], next_position: int) -> None:
    """A header of 10 tokens and chunks of 3, 7 and 2."""
    assert LAYOUTS[name](10, [3, 7, 2]) == Layout(starts, next_position)
    assert LAYOUTS[name](10, []).next_position == 10
