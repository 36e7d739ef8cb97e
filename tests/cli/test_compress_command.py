"""compress: what is kept of a prompt, in how many bytes, and the answer over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom

PROMPT = "".join(f"Barge {n} carried {n * 7} tons of grey stone up the river to the town. " for n in range(6))
BYTES_PER_ROW = 2 * 4 * 2 * 16 * 4  # keys and values, layers, kv heads, head dim, float32


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    return path


def test_each_compressor_says_what_it_keeps_and_in_how_many_bytes(
    kvloom: Kvloom, tiny_model: Path, prompt: Path
) -> None:
    named = ("snapkv:window=8", "pyramidkv:window=8,kernel=3", "knorm", "infokv:window=400")
    rows = [part for name in named for part in ("-c", name)]
    found = kvloom.ok("compress", prompt, "-m", tiny_model, *rows, "-o", "keep=0.25", "--json").json
    tokens = found["prompt_tokens"]
    by = {row["method"]: row for row in found["methods"]}
    assert list(by) == list(named)
    assert found["layers"] == 4
    assert tokens > 100
    kept = tokens // 4
    for name in named[:1] + named[2:3]:
        assert by[name]["kept"] == [kept] * 4
        assert by[name]["bytes_before"] == tokens * BYTES_PER_ROW
        assert by[name]["bytes_after"] == kept * BYTES_PER_ROW
        assert by[name]["note"] == ""
        assert by[name]["prefill_s"] > 0
    pyramid = by[named[1]]["kept"]
    assert sum(pyramid) == 4 * kept
    assert pyramid[0] > pyramid[3]
    assert by["infokv:window=400"]["kept"] == [tokens] * 4
    assert (
        by["infokv:window=400"]["note"] == f"not compressed: {tokens} tokens, of which {tokens} are protected"
    )
    assert "answer" not in by["knorm"]


def test_the_table_shows_the_range_and_every_layer_where_asked(
    kvloom: Kvloom, tiny_model: Path, prompt: Path
) -> None:
    args = ("compress", prompt, "-m", tiny_model, "-c", "pyramidkv:window=8,kernel=3,keep=0.25")
    kept = kvloom.ok(*args, "--json").json["methods"][0]["kept"]
    shown = kvloom.ok(*args).stdout
    assert f"{min(kept)}-{max(kept)}" in shown
    layers = kvloom.ok(*args, "--layers").stdout.splitlines()
    tail = [line.split() for line in layers if line.split() and line.split()[0] in "0123"]
    assert [[int(cell) for cell in line] for line in tail] == [[n, kept[n]] for n in range(4)]


def test_plain_text_is_no_chat_turn_and_keep_1_drops_nothing(
    kvloom: Kvloom, tiny_model: Path, prompt: Path
) -> None:
    args = ("compress", "-", "-m", tiny_model, "-c", "knorm", "-o", "keep=1", "--json")
    chat = kvloom.ok(*args, stdin=PROMPT).json
    plain = kvloom.ok(*args, "--plain", stdin=PROMPT).json
    assert plain["prompt_tokens"] < chat["prompt_tokens"]
    (row,) = plain["methods"]
    assert row["kept"] == [plain["prompt_tokens"]] * 4
    assert (row["bytes_before"], row["note"]) == (row["bytes_after"], "keep=1: nothing is dropped")
    assert kvloom.ok(*args[:1], prompt, *args[2:]).json["prompt_tokens"] == chat["prompt_tokens"]


def test_an_answer_over_the_compressed_cache_which_is_compressed_itself(
    kvloom: Kvloom, tiny_model: Path, prompt: Path, tmp_path: Path
) -> None:
    args = ("compress", prompt, "-m", tiny_model, "-c", "knorm:keep=0.6", "--max-new-tokens", "132")
    whole = kvloom.ok(*args, "--json", "--save", "cache").json["methods"][0]
    assert (whole["decode_compressions"], whole["saved"]) == ([], "cache")
    assert (tmp_path / "cache").stat().st_size > whole["bytes_at_end"]
    grown = kvloom.ok(*args, "-d", "r-kv", "--json").json["methods"][0]
    assert grown["new_tokens"] == whole["new_tokens"] == 132
    assert len(grown["decode_compressions"]) == 1
    assert grown["bytes_at_end"] < whole["bytes_at_end"]
    assert grown["answer"][:40] == whole["answer"][:40] != ""
    shown = kvloom.ok(*args, "-d", "r-kv")
    assert "knorm:keep=0.6, 132 tokens in" in shown.stdout
    assert "compressed 1 time while it grew" in shown.stdout


def test_steps_are_timed_over_either_cache(kvloom: Kvloom, tiny_model: Path, prompt: Path) -> None:
    args = ("compress", prompt, "-m", tiny_model, "-c", "knorm", "-c", "infokv:window=8", "-o", "keep=0.25")
    found = kvloom.ok(*args, "--steps", "3", "--json").json
    tokens = found["prompt_tokens"]
    for row, has_head in zip(found["methods"], (False, True), strict=True):
        speed = row["speed"]
        assert speed["full_bytes"] == (tokens + 5) * BYTES_PER_ROW, "three steps, and two to warm up"
        assert speed["compressed_bytes"] == (tokens // 4 + 5) * BYTES_PER_ROW
        assert (speed["head_s"] > 0) == has_head
        assert min(speed[name] for name in ("full_ms", "compressed_ms", "prefill_s", "peak_bytes")) > 0
    done = kvloom.ok(*args, "--steps", "3")
    assert done.stderr == ""
    assert "step ms" in done.stdout
    assert "step ms" not in kvloom.ok(*args).stdout
    sentence = kvloom.refused(*args, "--steps", "2000")
    assert "2,002 steps follow, the model takes 2,048: shorten the prompt or ask for fewer --st" in sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no.txt"], "no.txt does not exist; give a text file, or - for standard input"),
        (["."], ". cannot be read: Is a directory; give a text file"),
        (["-"], "the prompt on standard input is empty; write a prompt"),
        (["prompt.txt", "-d", "rpc"], "-d compresses an answer while it grows; ask for one with"),
        (
            ["prompt.txt", "-c", "knorm", "-c", "tova", "--save", "c"],
            "--save writes one cache, 2 comp",
        ),
        (["prompt.txt", "--save", "no/c"], "--save no/c is not a file in a folder that exists"),
        (["prompt.txt", "-c", "infokw"], "unknown compressor 'infokw'; did you mean 'infokv'?"),
        (["prompt.txt", "-c", "rpc"], "rpc compresses answers while they grow, not prompts"),
        (["prompt.txt", "-c", "knorm", "-c", "knorm:keep=0.4"], "'knorm' and 'knorm:keep=0.4' are the same"),
        (
            ["prompt.txt", "-c", "knorm:keep=0.4", "-o", "keep=0.2"],
            "'knorm:keep=0.4': keep is given with the method and for all",
        ),
        (["prompt.txt", "-o", "keep=1.5"], "infokv: keep is the share of tokens to keep"),
        (["prompt.txt", "-d", "knorm", "--max-new-tokens", "4"], "knorm compresses prompts only"),
    ],
)
def test_bad_options_are_found_before_the_model(
    kvloom: Kvloom, prompt: Path, options: list[str], sentence: str
) -> None:
    assert kvloom.refused("compress", *options, "-m", "./no-model").startswith(sentence)


def test_a_prompt_longer_than_the_model_takes(kvloom: Kvloom, tiny_model: Path) -> None:
    sentence = kvloom.refused("compress", "-", "-m", tiny_model, stdin="stone " * 2000)
    assert sentence.endswith("shorten the prompt or ask for fewer new tokens")
