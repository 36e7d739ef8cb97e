"""view: a page for a question over documents, or for a sample of a set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from command_line import Kvloom

DATA = Path(__file__).parent.parent / "eval" / "data"


def num_marked(page: str) -> list[int]:
    """Tokens marked as recomputed, by panel."""
    return [len(re.findall(r'<i class="[^"]*new"', panel)) for panel in page.split("<section>")[1:]]


def test_a_question_over_documents(kvloom: Kvloom, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "view.html"
    ask = ("Who bought the mill?", texts / "mill.txt", texts / "more", "-m", tiny_model)
    asked = kvloom.ok(
        "ask", "Who bought the mill?", texts, "-m", tiny_model, "-o", "ratio=0.2", "--json"
    ).json
    found = kvloom.ok("view", *ask, "-o", "ratio=0.2", "--out", out, "--json").json
    (panel,) = found["panels"]
    assert panel["method"].startswith("InfoFlow(ratio=0.2, ")
    assert panel["recomputed_rows"] == int(0.2 * panel["context_tokens"])
    page = out.read_text()
    assert num_marked(page) == [panel["recomputed_rows"]], "the text is plain ASCII"
    assert "<title>Who bought the mill?</title>" in page
    assert "2 passages" in page
    assert asked["trace"]["context_tokens"] > panel["context_tokens"], "the bridge was not among them"
    whole = kvloom.ok(
        "view", "Who bought the mill?", texts, "-m", tiny_model, "-o", "ratio=0.2", "--out", out, "--json"
    )
    assert whole.json["panels"][0]["rows"] == asked["trace"]["rows"], "what ask recomputes"
    picked = kvloom.ok("view", "Who bought the mill?", texts, "-m", tiny_model, "--top", "1", "--out", out)
    assert picked.stdout == f"{out}\n"
    assert "1 passage<" in out.read_text()


def test_a_panel_for_each_method(kvloom: Kvloom, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "view.html"
    methods = ("-s", "infoflow:ratio=0.1", "-s", "none", "-s", "infoflow:reorder=true")
    found = kvloom.ok(
        "view", "-", texts, "-m", tiny_model, *methods, "--out", out, "--json", stdin="Who?"
    ).json
    first, none, reordered = found["panels"]
    assert found["question"] == "Who?"
    assert num_marked(out.read_text()) == [panel["recomputed_rows"] for panel in (first, none, reordered)]
    assert none["recomputed_rows"] == 0
    assert reordered["method"].endswith("reorder=True")
    plain = kvloom.ok("view", "Who?", texts, "-m", tiny_model, "--reorder", "--out", out, "--json").json
    assert plain["panels"] == [reordered]


def test_a_sample_of_a_set(kvloom: Kvloom, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "view.html"
    args = ("view", "--set", "hotpotqa", "--data", DATA, "-m", tiny_model, "--out", out)
    kvloom.ok(*args, "--sample", "h1")
    page = out.read_text()
    assert "In which town does the brother of Tilda Moss live?" in page
    assert "Gold answer: Brackwater" in page
    assert page.count('<b class="gold">') == 2, "two of three passages"
    kvloom.ok(*args, "--sample", "1")
    assert out.read_text() == page
    assert kvloom.refused(*args, "--sample", "9").startswith(
        "there is no sample '9'; give an id such as 'h1'"
    )


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "name a question and documents, or a sample of a set with --set and --sample"),
        (["Who?"], "name a question and documents, or a sample of a set"),
        (["Who?", "no.txt"], "no.txt does not exist; give a file, a folder, or - for standard input"),
        (["Who?", "texts", "--set", "hotpotqa", "--sample", "1"], "--set brings question and documents, so"),
        (["--set", "hotpotqa"], "--set and --sample go together"),
        (["Who?", "texts", "--sample", "1"], "--set brings question and documents"),
        (["--sample", "1"], "--set and --sample go together"),
        (["--set", "hotpotq", "--sample", "1"], "unknown benchmark 'hotpotq'; did you mean 'hotpotqa'?"),
        (["Who?", "texts", "-s", "infoflw"], "unknown selector 'infoflw'; did you mean 'infoflow'?"),
        (
            ["Who?", "texts", "-s", "epic", "-s", "none", "-o", "ratio=.1"],
            "-o goes with one plain -s NAME; wi",
        ),
        (
            ["Who?", "texts", "-s", "epic:k=2", "-o", "ratio=.1"],
            "-o goes with one plain -s NAME; with -s epic",
        ),
        (["Who?", "texts", "-o", "ratio"], "option 'ratio' is not of the form NAME=VALUE"),
        (
            ["Who?", "texts", "-s", "infoflow:reorder=true", "--reorder"],
            "--reorder and -s infoflow:reorder=tr",
        ),
        (["Who?", "texts", "--out", "texts"], "--out texts is not a file in a folder that exists"),
        (["Who?", "texts", "--out", "no/view.html"], "--out no/view.html is not a file in a folder that exi"),
        (["-", "-"], "question and documents cannot both come from standard input"),
    ],
)
def test_bad_input_is_one_sentence(
    kvloom: Kvloom, texts: Path, args: list[str], sentence: str, tmp_path: Path
) -> None:
    # the model does not exist: every one of these is found before it is looked for
    out = [] if "--out" in args else ["--out", tmp_path / "view.html"]
    refused = kvloom.refused("view", *args, "-m", "./no-model", "--data", DATA, *out)
    assert refused.startswith(sentence)


def test_what_only_the_model_can_tell_is_one_sentence_too(
    kvloom: Kvloom, tiny_model: Path, texts: Path, tmp_path: Path
) -> None:
    args = ("view", "Who?", texts, "-m", tiny_model, "--out", tmp_path / "view.html")
    assert kvloom.refused(*args, "-s", "full").startswith("full computes every row, so there is no choice")
    assert kvloom.refused(*args, "-s", "epic:reorder=true").startswith("epic does not reorder documents")
    assert kvloom.refused(*args, "-s", "infoflow:layers=99").startswith(
        "infoflow: layers '99', but the model"
    )
    assert not (tmp_path / "view.html").exists()
