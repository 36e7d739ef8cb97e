from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import loom_of

from kvloom.selectors import Full, NoRecompute

if TYPE_CHECKING:
    import pytest

STAGES = Path(__file__).parent.parent / "bench" / "stages.py"


def test_stages_prints_a_row_per_method_of_the_length_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    bench: dict[str, Any] = runpy.run_path(str(STAGES))
    bench["measure"](loom_of("llama"), 1500, [Full(), NoRecompute()], 1)
    full, none = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert 300 < int(full[0].strip("| ").replace(",", "")) <= 1500
    assert (full[1], none[1]) == ("full", "none")
    assert full[-1] == "1.00 |"
    assert 0 < float(none[-1].rstrip(" |")) < 1
    assert none[2] == "0"
