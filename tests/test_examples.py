from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.selectors import selectors

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_new_selector_works_by_name_as_soon_as_its_file_is_run() -> None:
    loom = loom_of("llama")
    try:
        example = runpy.run_path(str(EXAMPLES / "new_selector.py"))
        chosen = selectors.build("rare", {"attention": "0", "ratio": "0.1"})
        assert isinstance(chosen, example["Rare"])
        prompt = loom.prompt(QUESTION, DOCUMENTS)
        rows = loom.select(loom.splice(prompt), prompt, chosen)
        counts = torch.bincount(prompt.context_ids, minlength=300)[prompt.context_ids]
        late = torch.arange(prompt.spans[1].start, len(counts))
        assert int(counts[rows].max()) <= int(counts[late].sort().values[len(rows) - 1])
        trace = loom.answer(QUESTION, DOCUMENTS, selector=chosen, max_new_tokens=2).trace
        assert trace.recomputed_rows == len(rows)
    finally:
        selectors._classes.pop("rare", None)  # type: ignore[attr-defined]


@pytest.mark.real_model
def test_the_quickstart_runs_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    assert "card" in lines[0].lower()
    assert lines[1].endswith("rows computed again")
    assert len(lines) >= 4
