"""Bad input is refused with one clear sentence and 2, a failure with 1; what can be left out is, aloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from command_line import copy_model, entries

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-o", "ratio=-1"], "infoflow: ratio is the share of rows to recompute, from 0 to 1, got -1.0"),
        (["-o", "ratio=2"], "infoflow: ratio is the share of rows to recompute, from 0 to 1, got 2.0"),
        (["-o", "ratio=abc"], 'infoflow: option ratio: "abc" will not do: input should be a valid number'),
        (["-o", "ratoi=0.1"], "selector 'infoflow' has no option 'ratoi'; did you mean 'ratio'?"),
        (["-o", "ratio=.1", "-o", "ratio=.2"], "option 'ratio' is given twice"),
        (["-s", "infoflw"], "unknown selector 'infoflw'; did you mean 'infoflow'?"),
        (
            ["--top", "0"],
            "invalid value for '--top': Input should be greater than or equal to 1 (see kvloom ask --help)",
        ),
        (
            ["--temperature", "-1"],
            "invalid value for '--temperature': Input should be greater than or equal to 0",
        ),
        (["--top-p", "0"], "top_p must lie above 0 and not above 1, got 0.0"),
        (["--stop", ""], "a stop string must not be empty"),
        (["--chunk-tokens", "1"], "chunk_tokens must be at least 32, got 1"),
        (["--dtype", "int8"], "invalid value for '--dtype': "),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used here: "),
        (["--device", "gpu"], "device 'gpu' cannot be used here: "),
        (["--store", "rediss:x"], "unknown store 'rediss'; did you mean 'redis'?"),
        (["--store", "here"], "store 'here' has no scheme; for a folder write 'disk:here'"),
    ],
)
def test_bad_options(kvloom: Kvloom, texts: Path, options: list[str], sentence: str) -> None:
    # the model does not exist: every one of these is found before it is looked for
    refused = kvloom.refused("ask", "Who?", texts, "-m", "./no-model", *options)
    assert refused.startswith(sentence)


def test_bad_questions(kvloom: Kvloom, texts: Path) -> None:
    assert kvloom.refused("ask", "-", texts, "-m", "m", stdin=" \n") == "the question is empty; ask something"
    sentence = kvloom.refused("ask", "-", texts, "-m", "m", stdin=b"\xff\xfe?")
    assert sentence == "the question on standard input is not UTF-8 text"


def test_bad_models(kvloom: Kvloom, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    def refused(model: str | Path) -> str:
        return kvloom.refused("index", texts, "-m", model, code=1)

    missing = tmp_path / "missing"
    assert refused(missing).startswith(f"model folder '{missing}' does not exist; ")
    bare = copy_model(tiny_model, tmp_path / "bare", without="*.safetensors")
    assert refused(bare).startswith(f"model folder '{bare}' has no weights (*.safetensors); ")
    shapeless = copy_model(tiny_model, tmp_path / "shapeless", without="config.json")
    assert refused(shapeless).startswith(f"model folder '{shapeless}' has no config.json; ")
    cut = copy_model(tiny_model, tmp_path / "cut", without="nothing")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert refused(cut).startswith(f"cannot load model '{cut}': ")
    assert refused("bundled:gpt").startswith("unknown bundled model 'bundled:gpt'; ")
    assert not entries(kvloom.store)


def test_sources_without_a_document(kvloom: Kvloom, tmp_path: Path) -> None:
    def refused(source: str | Path, **options: str | bytes) -> str:
        done = kvloom("index", source, "-m", "m", **options)
        assert (done.code, done.stdout) == (2, "")
        lines = done.stderr.splitlines()
        assert len(lines) == 1
        return lines[0].removeprefix("kvloom: error: ")

    empty = tmp_path / "empty"
    empty.mkdir()
    wanted = "holds no document; looked for .txt, .md, .markdown, .jsonl, .json files that are not empty"
    assert refused(empty) == f"{empty} {wanted}"
    (empty / "blank.txt").write_text(" \n")
    assert refused(empty) == f"{empty} {wanted}; {empty / 'blank.txt'} is empty"
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"a\0b")
    assert f"{binary} is binary" in refused(binary)
    latin = tmp_path / "latin.md"
    latin.write_bytes("caf\xe9".encode("latin-1"))
    assert "is not UTF-8; save the file as UTF-8 text" in refused(latin)
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG")
    assert refused(picture).startswith(f"{picture} is not one of .txt, .md")
    assert refused("-", stdin="").startswith("standard input holds no document")


def test_files_that_cannot_be_used_are_left_out_aloud(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    (texts / "binary.txt").write_bytes(b"a\0b")
    (texts / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (texts / "link.txt").symlink_to("nowhere")
    (texts / "lines.jsonl").write_text('{"text": "A good line."}\n{"txet": "A bad line."}\n')
    (texts / "copy.txt").write_text((texts / "mill.txt").read_text())
    (texts / "picture.png").write_bytes(b"\x89PNG")
    done = kvloom.ok("index", texts, "-m", tiny_model, "--json")
    assert (done.json["documents"], done.json["duplicates"], done.json["other_files"]) == (4, 1, 1)
    assert len(done.json["skipped"]) == 4
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"kvloom: left out: {texts}/") for line in lines)


def test_a_prompt_that_does_not_fit_says_how_many_documents_would(
    kvloom: Kvloom, tiny_model: Path, many: Path
) -> None:
    args = ("ask", "What did the barges carry?", many, "-m", tiny_model)
    sentence = kvloom.refused(*args, "--top", "60")
    prefix, _, fitting = sentence.rpartition(" --top ")
    assert prefix.startswith("prompt has ")
    assert "tokens, model takes 2,048: give fewer documents or" in prefix
    kvloom.ok(*args, "--top", fitting, "--max-new-tokens", "1")
    kvloom.refused(*args, "--top", str(int(fitting) + 6))


def test_bad_question_files(kvloom: Kvloom, texts: Path, tmp_path: Path) -> None:
    def refused(name: str, content: str | bytes) -> str:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return kvloom.refused("verify", texts, "-m", "m", "--questions", tmp_path / name)

    assert refused("empty.txt", "\n").endswith("empty.txt holds no question; write one a line")
    assert refused("latin.txt", b"\xe9").endswith("latin.txt is not UTF-8 text")
    assert refused("bad.jsonl", "who?").endswith("bad.jsonl:1 is not JSON")
    assert refused("other.jsonl", '{"question": "Who?"}\n{"q": 1}').endswith(
        'jsonl:2 has no "question" that is text'
    )
    missing = kvloom.refused("verify", texts, "-m", "m", "--questions", tmp_path / "missing.txt")
    assert missing.endswith("missing.txt cannot be read: No such file or directory")
    assert kvloom.refused("verify", texts, "-m", "m", "-q", " ") == "a question is empty; ask something"
    assert "invalid value for '--ratio'" in kvloom.refused("verify", texts, "-m", "m", "--ratio", "1.5")
