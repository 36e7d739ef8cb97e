"""Rows in short, and what a trace says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.trace import Trace, as_ranges, from_ranges


@given(st.sets(st.integers(0, 300)))
def test_rows_survive_their_short_form(rows: set[int]) -> None:
    assert from_ranges(as_ranges(sorted(rows))) == sorted(rows)


def test_rows_in_short() -> None:
    assert as_ranges([3, 4, 5, 9]) == "3-5,9"
    assert as_ranges([]) == ""
    with pytest.raises(ValueError, match="invalid literal"):
        from_ranges("3-x")


def test_a_trace_as_plain_data() -> None:
    trace = Trace(recomputed_rows=3, rows=[0, 1, 7])
    trace.seconds.splice, trace.seconds.decode = 0.25, 4.0
    data = trace.as_dict()
    assert data["rows"] == "0-1,7"
    assert data["seconds"]["ttft"] == 0.25
