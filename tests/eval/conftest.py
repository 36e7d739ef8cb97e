"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import pytest

from kvloom.eval import plots


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of numbers: drawing takes most of the time."""
    for name in ("quality", "ttft", "kinds", "heatmaps", "layers"):
        monkeypatch.setattr(plots, name, lambda *_, **__: "<svg ></svg>")
