"""Samples from files, gzip, the hub and the haystack: what they hold, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.errors import EvalError, MethodError
from kvloom.eval import passages
from kvloom.eval.benchmark import (
    Sample,
    as_passages,
    benchmarks,
    build,
    data_folder,
    digest,
    find,
    joined,
    load,
    take,
)
from kvloom.eval.benchmarks.needle import Needle, hide
from kvloom.prompt import Document

DATA = Path(__file__).parent / "data"
SETS = {
    "2wikimultihopqa": True,
    "hotpotqa": True,
    "musique": True,
    "musique_cacheblend": True,
    "narrativeqa": False,
    "needle": False,
    "qasper": False,
    "xquad": False,
}
LINE = {
    "id": "x",
    "question": "Who?",
    "answers": ["Ada"],
    "passages": [{"title": "", "text": "It was Ada."}],
}


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLOOM_DATA", raising=False)


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_sets() -> None:
    assert {name: benchmarks[name].is_multihop for name in benchmarks} == SETS
    for name in benchmarks:
        cls = benchmarks[name]
        assert cls.version
        assert cls.licence
        assert cls.description


def test_a_line_becomes_a_sample() -> None:
    samples = load("hotpotqa", DATA)
    assert [sample.id for sample in samples] == ["h1", "h2", "h3"]
    assert samples[0] == Sample(
        id="h1",
        question="In which town does the brother of Tilda Moss live?",
        answers=("Brackwater",),
        documents=(
            Document("Tilda Moss is a baker. Her brother is Orin Moss.", id="h1/0", title="Tilda Moss"),
            Document("Vell is a river.", id="h1/1", title="Vell"),
            Document("Orin Moss lives in Brackwater.", id="h1/2", title="Orin Moss"),
        ),
        supporting=(0, 2),
        kind="bridge",
    )
    assert as_passages(samples[0]) == samples[0].documents
    assert samples[2].answers == ("Édith Ravn",)


def test_limit_takes_the_first() -> None:
    assert [sample.id for sample in load("hotpotqa", DATA, 2)] == ["h1", "h2"]
    assert len(load("hotpotqa", DATA, 99)) == 3
    with pytest.raises(EvalError, match="at least 1, got 0"):
        load("hotpotqa", DATA, 0)


def test_a_sample_is_found_by_its_id_or_else_by_its_number() -> None:
    samples = load("hotpotqa", DATA)
    assert find(samples, "h2") is samples[1]
    assert find(samples, "3") is samples[2]
    assert find([replace(samples[0], id="2"), *samples[1:]], "2").id == "2", "an id before a number"
    for wanted in ("0", "4", "-1", "h9", "1.0", "²"):
        with pytest.raises(EvalError, match=f"no sample '{wanted}'; give an id such as 'h1', or a number"):
            find(samples, wanted)


def test_the_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVLOOM_DATA", str(DATA))
    assert len(load("hotpotqa")) == 3
    assert data_folder(tmp_path) == tmp_path  # what is named wins
    monkeypatch.setenv("KVLOOM_DATA", "")
    assert data_folder() is None
    monkeypatch.setenv("KVLOOM_DATA", str(tmp_path / "gone"))
    with pytest.raises(EvalError, match=r"gone' \(KVLOOM_DATA\) does not exist; name one"):
        load("hotpotqa")


def test_gzip_is_read_alike(tmp_path: Path) -> None:
    packed = tmp_path / "hotpotqa" / "hotpotqa.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress((DATA / "hotpotqa" / "hotpotqa.jsonl").read_bytes()))
    assert load("hotpotqa", tmp_path) == load("hotpotqa", DATA)
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(EvalError, match=r"hotpotqa\.jsonl\.gz cannot be read after line"):
        load("hotpotqa", tmp_path)


def test_narrativeqa_has_parts() -> None:
    assert [(s.id, s.kind) for s in load("narrativeqa", DATA)] == [
        ("n_sum", "summaries"),
        ("n_story", "stories"),
    ]
    assert [s.id for s in load("narrativeqa", DATA, options={"part": "stories"})] == ["n_story"]
    with pytest.raises(MethodError, match="option part"):
        load("narrativeqa", DATA, options={"part": "poems"})


def test_cacheblend_samples_say_whether_the_answer_is_there(tmp_path: Path) -> None:
    """The chunks have blanks around punctuation, the answers have not."""
    texts = ["it was the well - known liu yin .", "so said o ' neill in 1661 ."]
    lines = [
        {
            **LINE,
            "id": answer,
            "answers": [answer],
            "passages": [{"title": "", "text": text} for text in texts],
        }
        for answer in ("Well-known Liu Yin", "O'Neill", "661", "Liu")
    ]
    write(tmp_path / "musique_cacheblend" / "musique_cacheblend.jsonl", *lines)
    kinds = [sample.kind.removeprefix("answer ") for sample in load("musique_cacheblend", tmp_path)]
    assert kinds == ["found", "found", "not found", "found"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"hotpotqa\.jsonl:2: Invalid JSON"),
        ({"id": "y"}, r":2: question: Field required"),
        ({**LINE, "answers": "Ada"}, r":2: answers: Input should be a valid (array|list)"),
        ({**LINE, "id": 3}, r":2: id: Input should be a valid string"),
        ({**LINE, "passages": [{"title": ""}]}, r":2: passages\.0\.text: Field required"),
        ({**LINE, "answers": []}, r":2: sample 'x' has no answer"),
        ({**LINE, "answers": [" "]}, r":2: sample 'x' has no answer"),
        ({**LINE, "question": " "}, r":2: sample 'x' has no question"),
        ({**LINE, "passages": []}, r":2: sample 'x' has no passages"),
        ({**LINE, "passages": [{"text": "\n"}]}, r":2: sample 'x': passage 0 is empty"),
        ({**LINE, "supporting": [1]}, r":2: sample 'x': supporting names passage 1, there are 1"),
        (LINE, "the id 'x' stands twice"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    write(tmp_path / "hotpotqa" / "hotpotqa.jsonl", LINE, line)
    with pytest.raises(EvalError, match=message):
        load("hotpotqa", tmp_path)
    assert load("hotpotqa", tmp_path, 1)[0].id == "x"  # what is not asked for is not read


def test_what_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"musique\.jsonl is missing.*github\.com/StonyBrookNLP.*LongBench"):
        load("musique", tmp_path)
    with pytest.raises(EvalError, match=r"xquad_en\.jsonl is missing[^;]*; make it.*github\S*xquad$"):
        load("xquad", tmp_path)
    with pytest.raises(EvalError, match=r"name a data folder .* with xquad_en/xquad_en\.jsonl in it"):
        load("xquad")
    with pytest.raises(EvalError, match=r"no text in .*haystack"):
        load("needle", tmp_path)
    with pytest.raises(EvalError, match="name a data folder"):
        load("needle")
    with pytest.raises(MethodError, match="did you mean 'hotpotqa'"):
        load("hotpot", DATA)
    with pytest.raises(MethodError, match="no option 'part'"):
        load("hotpotqa", DATA, options={"part": "all"})
    write(tmp_path / "xquad_en" / "xquad_en.jsonl", "", "")
    with pytest.raises(EvalError, match="xquad has no samples"):
        load("xquad", tmp_path)


def fake_hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, Any]]:
        calls.append((args, options))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_longbench_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    context = (
        "Passage 1:\nTilda Moss\nTilda Moss is a baker.\n\nLife\nShe was born in Vell.\n\n"
        "Passage 2:\nOrin Moss\nOrin wrote of it:\nPassage 7:\nnot a heading.\n"
        "Passage 3:\nA line alone\n"
    )
    row = {"_id": "r1", "input": "Who?", "context": context, "answers": ["Tilda", "Moss"], "length": 9}
    calls = fake_hub(monkeypatch, [row, {**row, "_id": "r2"}])
    samples = load("2wikimultihopqa", limit=1)
    member = (
        "zip://data/2wikimqa.jsonl::https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
    )
    assert calls == [(("json",), {"data_files": {"test": member}, "split": "test"})]
    assert samples == [
        Sample(
            id="r1",
            question="Who?",
            answers=("Tilda", "Moss"),
            documents=(
                Document(
                    "Tilda Moss is a baker.\n\nLife\nShe was born in Vell.", id="r1/0", title="Tilda Moss"
                ),
                Document("Orin wrote of it:\nPassage 7:\nnot a heading.", id="r1/1", title="Orin Moss"),
                Document("A line alone", id="r1/2"),
            ),
        )
    ]
    fake_hub(monkeypatch, [{**row, "context": "Some text"}])
    with pytest.raises(EvalError, match=r"'r1': the context does not begin"):
        load("hotpotqa")


def test_longbench_plain_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    paragraphs = [" ".join(f"{letter}{number}" for number in range(90)) + "." for letter in "abc"]
    context = "\n\n".join(paragraphs)
    fake_hub(monkeypatch, [{"_id": "r1", "input": "Who?", "context": context, "answers": ["a"]}])
    (sample,) = load("qasper")
    assert [document.text for document in sample.documents] == ["\n\n".join(paragraphs[:2]), paragraphs[2]]
    (story,) = load("narrativeqa", options={"part": "stories"})
    assert story == replace(sample, kind="stories")
    with pytest.raises(EvalError, match="stories only; ask for part=stories"):
        load("narrativeqa")


def test_the_hub_fails_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it is an ImportError
    with pytest.raises(EvalError, match=r"KVLOOM_DATA, or pip install 'kvloom\[eval\]'"):
        load("hotpotqa")

    def load_dataset(*args: Any, **options: Any) -> None:
        raise RuntimeError("no\nroute")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(EvalError, match=r"hotpotqa could not be read .*RuntimeError: no route\); try again"):
        load("hotpotqa")


def test_joined_is_longbench_layout() -> None:
    sample = load("hotpotqa", DATA)[1]
    text = "Passage 1:\nVell\nThe Vell is 40 km long.\n\nPassage 2:\nSarn\nThe Sarn is 90 km long."
    assert joined(sample) == Document(text, id="h2")
    assert passages.split_passages(text) == [(d.title, d.text) for d in sample.documents]
    assert passages.join_passages([Document("a"), Document("b")]) == "Passage 1:\na\n\nPassage 2:\nb"
    assert passages.split_passages("Before.\nPassage 1:\nA\nb") == []
    assert passages.split_passages("Passage 2:\nA\nb") == []


def test_digest_sees_every_field() -> None:
    sample = load("hotpotqa", DATA)[0]
    others = [
        replace(sample, id="other"),
        replace(sample, question="Who?"),
        replace(sample, answers=("Vell",)),
        replace(sample, documents=sample.documents[::-1]),
        replace(sample, documents=(replace(sample.documents[0], title="T"), *sample.documents[1:])),
        replace(sample, supporting=(0,)),
        replace(sample, kind=""),
    ]
    assert len({digest([other]) for other in [sample, *others]}) == 8
    assert digest([sample, others[0]]) != digest([others[0], sample])
    assert digest([sample]) == digest(load("hotpotqa", DATA, 1))


def test_sentences() -> None:
    text = 'Mr. J. Watson of St. Ives paid 3.50 pounds. "Really?" No! (Yes.) The end'
    assert passages.sentences(text) == [
        "Mr. J. Watson of St. Ives paid 3.50 pounds.",
        '"Really?"',
        "No!",
        "(Yes.)",
        "The end",
    ]


def test_cut_keeps_every_word() -> None:
    heading, short, long = "HEADING", "one two three.", "a b c d. e f g h i. j k l m n o p q r s t u."
    assert passages.cut([heading, short, long], 6) == [
        "HEADING\n\none two three.",
        "a b c d.",
        "e f g h i.",
        "j k l m n o",
        "p q r s t u.",
    ]
    assert passages.cut([short, short], 6) == ["one two three.\n\none two three."]
    assert passages.cut([short, short], 5) == [short, short]
    assert passages.paragraphs("a\nb \n \n\nc\n") == ["a b", "c"]


def words_before(sample: Sample, needle: str) -> tuple[int, str]:
    """Words before the needle and the text there."""
    before = "\n\n".join(document.text for document in sample.documents).split(needle)[0]
    return len(before.split()), before.rstrip()


def test_needle_stands_where_it_should() -> None:
    needle = Needle(lengths=(300, 600), depths=(0, 30, 100), chunk=100, unit="words")
    samples = take(needle, DATA)
    cells = [(length, depth) for length in (300, 600) for depth in (0, 30, 100)]
    assert [sample.kind for sample in samples] == [f"length={n},depth={d}" for n, d in cells]
    for sample, (length, depth) in zip(samples, cells, strict=True):
        (number,) = sample.answers
        city = sample.question.split()[5]
        hidden = f"The special magic {city} number is {number}."
        holders = [place for place, document in enumerate(sample.documents) if number in document.text]
        assert sample.question == f"What is the special magic {city} number?"
        assert len(number) == 7
        assert holders == list(sample.supporting)
        assert hidden in sample.documents[holders[0]].text
        sizes = [len(document.text.split()) for document in sample.documents]
        assert max(sizes) <= 100 + 7
        total = sum(sizes) - 7
        assert length - 6 < total <= length  # to a whole sentence; the fixture's have six words
        place, before = words_before(sample, hidden)
        assert total * depth / 100 - 8 < place <= total * depth / 100
        assert before.endswith(".") or not before
    # Paragraphs of 60 words, so two do not fit a chunk: 0, 90 and 300 words lie in the chunks 0, 1 and 4.
    assert [sample.supporting[0] for sample in samples[:3]] == [0, 1, 4]


def test_needle_cells_share_their_haystack() -> None:
    """A sample is the same whichever others are asked for, and depth moves the needle and nothing else."""
    wide = Needle(lengths=(300, 600), depths=(0, 50, 100), rounds=2, chunk=100, unit="words", seed=5)
    narrow = replace(wide, lengths=(600,), depths=(50,))
    samples = take(wide, DATA)
    assert len(samples) == 12
    assert take(wide, DATA) == samples
    assert take(narrow, DATA) == [samples[4], samples[10]]
    start, middle, end = ([document.text for document in sample.documents] for sample in samples[3:6])
    assert start[1:] == [*middle[1 : samples[4].supporting[0]], *start[samples[4].supporting[0] :]]
    assert middle[0] == end[0] != start[0]
    assert len({sample.answers for sample in samples}) == 12
    # Another round or seed begins at another place of the text.
    assert samples[0].documents[1].text != samples[6].documents[1].text
    assert take(replace(wide, seed=6), DATA)[0].documents[1].text != samples[0].documents[1].text


def test_needle_seed_and_options_from_text() -> None:
    needle = build("needle", {"lengths": "[300]", "depths": "[50]", "unit": "words"}, seed=3)
    assert needle == Needle(lengths=(300,), depths=(50,), unit="words", seed=3)
    assert build("needle", {"seed": "4"}, seed=3) == Needle(seed=4)
    assert build("hotpotqa", seed=3) == build("hotpotqa")
    tokens = Needle(lengths=(400,), depths=(0,), chunk=200)
    (sample,) = take(tokens, DATA)
    assert 294 < sum(len(d.text.split()) for d in sample.documents) - 7 <= 300  # 0.75 words a token


def test_needle_in_a_given_text() -> None:
    text = "\n\n".join(f"Line {number} is here." for number in range(40))
    (sample,) = take(Needle(lengths=(100,), depths=(0,), unit="words", text=text))
    assert len(sample.documents) == 1
    for seed in range(3):  # wherever it begins, it goes on at its beginning
        (whole,) = take(Needle(lengths=(160,), depths=(0,), unit="words", text=text, seed=seed))
        assert sum(len(document.text.split()) for document in whole.documents) == 160 + 7
    assert "Line 0" not in repr(Needle(text=text))
    with pytest.raises(EvalError, match="holds 160 words, 200 are asked for"):
        take(Needle(lengths=(200,), unit="words", text=text))
    with pytest.raises(EvalError, match="holds 0 words"):
        take(Needle(text=" "))


def test_hide_by_hand() -> None:
    pieces = ["One two. Three four.", "Five six. Seven eight"]
    assert hide("N.", pieces, 0) == (["N. One two. Three four.", pieces[1]], 0)
    assert hide("N.", pieces, 24) == (["N. One two. Three four.", pieces[1]], 0)
    assert hide("N.", pieces, 25) == (["One two. N. Three four.", pieces[1]], 0)
    assert hide("N.", pieces, 74) == (["One two. Three four. N.", pieces[1]], 0)
    assert hide("N.", pieces, 100) == ([pieces[0], "Five six. N. Seven eight"], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "[]"}, "at least 100"),
        ({"lengths": "[99]"}, r"at least 100, got \[99\]"),
        ({"lengths": "[200, 200]"}, "lengths holds a value twice"),
        ({"depths": "[101]"}, "from 0 to 100"),
        ({"depths": "[]"}, "from 0 to 100"),
        ({"rounds": "0"}, "rounds must be at least 1"),
        ({"chunk": "49"}, "at least 50"),
        ({"unit": "lines"}, "unit"),
    ],
)
def test_needle_refuses(options: dict[str, str], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        build("needle", options)


REAL = os.environ.get("KVLOOM_DATA")


@pytest.mark.skipif(not REAL, reason="KVLOOM_DATA is not set")
@pytest.mark.parametrize(
    ("name", "passages", "num_supporting"),
    [
        ("hotpotqa", range(2, 11), 2),
        ("2wikimultihopqa", range(2, 11), 2),
        ("musique", range(20, 21), 2),
        ("xquad", range(5, 6), 1),
        ("qasper", range(13, 31), 0),
        ("narrativeqa", range(3, 123), 0),
        ("musique_cacheblend", range(10, 11), 0),
    ],
)
def test_real_data(name: str, passages: range, num_supporting: int) -> None:
    samples = load(name, REAL)
    assert len(samples) >= 40
    for sample in samples:
        assert len(sample.documents) in passages
        assert len(sample.supporting) >= num_supporting
    if name == "musique_cacheblend":
        found = sum(sample.kind == "answer found" for sample in samples)
        assert found / len(samples) == pytest.approx(0.786, abs=5e-4)  # as the data's README says


@pytest.mark.skipif(not REAL, reason="KVLOOM_DATA is not set")
def test_real_needle() -> None:
    samples = load("needle", REAL, options={"unit": "words"})
    assert len(samples) == 15
    for sample in samples:
        assert sum(sample.answers[0] in document.text for document in sample.documents) == 1
