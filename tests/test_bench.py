from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_models import loom_of

from kvloom.eval.benchmark import Sample
from kvloom.prompt import Document
from kvloom.selectors import Full, InfoFlow, NoRecompute
from kvloom.store.codecs import Coding
from kvloom.store.packing import Packing

if TYPE_CHECKING:
    import pytest

TOWNS = (("Ada", "Paris"), ("Bob", "Rome"), ("Cleo", "Oslo"))
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


def test_codecs_prints_a_row_per_codec_with_raw_as_its_own_yardstick() -> None:
    bench: dict[str, Any] = runpy.run_path(str(STAGES.with_name("codecs.py")))
    documents = tuple(Document(f"{name} lives in {town}." * 6, title=name) for name, town in TOWNS)
    sample = Sample("s1", "Where does Ada live?", ("Paris",), documents)
    names = ["raw", "bf16", "int4"]
    taken = {name: bench["Taken"]() for name in names}
    packings = {name: Packing(coding=Coding.parse(name)) for name in names}
    methods = [NoRecompute(), InfoFlow(ratio=0.15)]
    bench["measure"](loom_of("llama"), sample, methods, packings, taken)
    assert taken["raw"].to_raw == {"none": [0.0], "infoflow": [0.0]}
    assert 0 < taken["bf16"].to_raw["none"][0] < taken["int4"].to_raw["none"][0]
    assert taken["raw"].num_bytes > 1.8 * taken["bf16"].num_bytes > 3 * taken["int4"].num_bytes
    rows = [line.strip("| ").split(" | ") for line in bench["table"](taken, methods)[2:]]
    assert [row[0] for row in rows] == names
    assert float(rows[0][2]) == 1.0
    assert rows[0][7].startswith("+0.00")
