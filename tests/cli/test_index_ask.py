"""index and ask: what is stored once is reused by later processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from command_line import entries, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


def test_index_then_ask_in_another_process_prefills_nothing(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    first = kvloom.ok("index", texts, "-m", tiny_model, "--json").json
    assert (first["documents"], first["chunks"], first["new"], first["already_stored"]) == (3, 3, 3, 0)
    assert first["computed_tokens"] == first["tokens"]
    assert first["store_entries"] == len(entries(kvloom.store)) == 4  # and the header
    assert first["store_bytes"] == sum(path.stat().st_size for path in entries(kvloom.store))

    again = kvloom.ok("index", texts, "-m", tiny_model)
    assert ": 0 new, 3 already stored, 0 duplicates, 0 left out" in again.stdout
    assert again.stderr == ""

    asked = kvloom.ok(
        "ask", "Who built the bridge?", texts, "-m", tiny_model, "--max-new-tokens", "5", "--json"
    )
    assert asked.stderr == ""
    trace = asked.json["trace"]
    assert trace["prefilled_tokens"] == 0
    assert trace["reused_tokens"] == trace["context_tokens"] > first["tokens"]
    assert trace["recomputed_rows"] == int(0.15 * trace["context_tokens"])
    assert trace["method"].startswith("InfoFlow(ratio=0.15, ")
    assert asked.json["documents"] == ["bridge.md", "mill.txt", "more/abbey.txt"]
    assert 1 <= len(asked.json["token_ids"]) <= 5

    plain = kvloom.ok("ask", "Who built the bridge?", texts, "-m", tiny_model, "--max-new-tokens", "5")
    assert plain.stdout == asked.json["answer"] + "\n"
    parts = r"load [\d.]+, splice [\d.]+, score [\d.]+, recompute [\d.]+, first token [\d.]+"
    counts = r"(\d+) tokens reused, 0 prefilled, \d+ rows recomputed"
    line = rf"kvloom: infoflow 15%: first token after [\d.]+ s \({parts}\); {counts}"
    found = re.fullmatch(line, plain.sentence)
    assert found is not None, plain.sentence
    assert int(found[1]) == trace["reused_tokens"]


def test_a_new_process_answers_from_the_disk_tier(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    url = f"memory:64MiB,disk:{kvloom.folder / 'kv'}"
    args = (texts, "-m", tiny_model, "--store", url, "--json")
    assert kvloom.ok("index", *args).json["new"] == 3
    script = f"""
import json
from kvloom.documents import load_documents
from kvloom.loom import Loom
loom = Loom.from_pretrained({str(tiny_model)!r}, store={url!r})
trace = loom.answer("Who built the bridge?", load_documents({str(texts)!r}), max_new_tokens=4).trace
print(json.dumps(trace.as_dict()))
"""
    restarted = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | kvloom.env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    trace = json.loads(restarted.stdout)
    assert (trace["prefilled_tokens"], trace["seconds"]["prefill"]) == (0, 0)
    assert trace["reused_tokens"] == trace["context_tokens"] > 0
    assert [(found["hit"], found["tier"]) for found in trace["lookups"]] == [(True, "disk")] * 4


def test_a_second_index_says_what_changed(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    args = ("index", texts, "-m", tiny_model)
    assert kvloom.ok(*args).stdout.startswith("3 documents (3 new, 0 replaced, 0 unchanged), 3 chunks, ")
    listed = kvloom.ok("store", "list", "--documents", "--json").json
    assert [(document["id"], document["source"]) for document in listed] == [
        (name, str(texts)) for name in ("bridge.md", "mill.txt", "more/abbey.txt")
    ]
    assert all(document["recipe"] and document["num_tokens"] for document in listed)
    files = {path: path.stat().st_mtime_ns for path in kvloom.store.rglob("*.json")}
    first = kvloom.ok(*args, "--json").json
    assert (first["documents_unchanged"], first["new"], first["computed_tokens"]) == (3, 0, 0)
    assert first["tokens"] == sum(document["num_tokens"] for document in listed)
    assert {path: path.stat().st_mtime_ns for path in kvloom.store.rglob("*.json")} == files

    (texts / "mill.txt").write_text("The mill burned down.")
    kvloom.store.joinpath(listed[0]["keys"][0][:2], f"{listed[0]['keys'][0]}.safetensors").unlink()
    (texts / "new.txt").write_text("The weaver left.")
    again = kvloom.ok(*args, "--json").json
    found = (again["documents_new"], again["documents_replaced"], again["documents_unchanged"])
    assert (found, again["new"]) == ((1, 1, 2), 3)  # the chunk that the store lost is computed again
    assert kvloom.ok("store", "verify").stdout == "5 entries read, 0 bad\n"

    other = kvloom.folder / "other"
    other.mkdir()
    (other / "mill.txt").write_text("Another mill.")
    done = kvloom.ok("index", other, "-m", tiny_model)
    assert done.sentence == (
        f"kvloom: 1 document of another source had the same id, such as mill.txt of {texts}"
    )
    compressed = kvloom.ok(
        "store", "add", other, "-m", tiny_model, "--chunk-compressor", "streaming:keep=0.5"
    ).stdout
    assert compressed == "1 document: 0 new, 1 replaced, 0 unchanged; 1 chunk new, 1 freed\n"


def test_a_store_without_documents_holds_chunks(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    done = kvloom.ok("index", texts, "-m", tiny_model, "--store", f"fsspec:file://{kvloom.folder}/fs")
    assert done.stdout.startswith("3 documents (0 new, 0 replaced, 0 unchanged), 3 chunks, ")
    assert done.sentence.endswith(
        "keeps no documents: the chunks are stored, but not under the documents' ids"
    )


def test_a_local_ray_cluster(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    pytest.importorskip("ray")
    args = ("index", texts, "-m", tiny_model, "--json", "--ray", "local")
    done = kvloom.ok(*args, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert (done.json["documents_new"], done.json["chunks"], done.json["failed"]) == (3, 3, [])
    assert done.json["computed_tokens"] == done.json["tokens"] > 0
    assert done.stderr == ""
    again = kvloom.ok("index", texts, "-m", tiny_model, "--json").json
    assert (again["documents_unchanged"], again["new"]) == (3, 0)
    assert kvloom.refused("index", texts, "-m", tiny_model, "--ray-workers", "2") == (
        "--ray-workers is for a Ray cluster; name it with --ray ADDRESS, or --ray local"
    )


def test_a_process_from_nothing_gives_the_same_answer(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    args = [
        "ask",
        "Who built the bridge?",
        str(texts),
        "-m",
        str(tiny_model),
        "--max-new-tokens",
        "5",
        "--json",
    ]
    forked = kvloom.ok(*args, env={"KVLOOM_CACHE": str(kvloom.folder / "another")}).json
    real = subprocess.run(
        [sys.executable, "-m", "kvloom", *args],
        env=os.environ | kvloom.env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert real.stderr == ""
    assert json.loads(real.stdout)["token_ids"] == forked["token_ids"]


def test_ask_works_without_index_and_stores_for_the_next(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    env = {"KVLOOM_MODEL": str(tiny_model), "KVLOOM_STORE": f"disk:{kvloom.folder / 'elsewhere'}"}
    args = ("ask", "Who built the bridge?", texts, "--max-new-tokens", "4", "--json")
    cold, warm = (kvloom.ok(*args, env=env).json for _ in range(2))
    assert cold["trace"]["reused_tokens"] == warm["trace"]["prefilled_tokens"] == 0
    assert cold["trace"]["prefilled_tokens"] == warm["trace"]["reused_tokens"] > 0
    assert cold["token_ids"] == warm["token_ids"]
    assert len(entries(kvloom.folder / "elsewhere")) == 4
    assert not kvloom.store.exists()
    in_memory = kvloom.ok(*args, "--store", "memory:", env=env).json
    assert in_memory["token_ids"] == cold["token_ids"]


def test_ratio_zero_and_one_are_the_two_ends(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    def ask(*options: str) -> dict:
        return kvloom.ok(
            "ask", "Who owned the mill?", texts, "-m", tiny_model, "--max-new-tokens", "4", "--json", *options
        ).json

    none, zero, one, full = ask("-s", "none"), ask("-o", "ratio=0"), ask("-o", "ratio=1"), ask("-s", "full")
    assert zero["trace"]["recomputed_rows"] == none["trace"]["recomputed_rows"] == 0
    assert zero["token_ids"] == none["token_ids"]
    assert one["token_ids"] == full["token_ids"]
    assert (
        full["trace"]["recomputed_rows"] == full["trace"]["context_tokens"] > one["trace"]["recomputed_rows"]
    )


def test_documents_and_question_from_stdin(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    lines = "\n".join(json.dumps({"id": n, "text": f"Barge {n} carried stone."}) for n in (1, 2, 2, 3, 3))
    done = kvloom.ok("index", "-", "-m", tiny_model, "--json", stdin=lines).json
    assert (done["documents"], done["new"], done["duplicates"]) == (3, 3, 2)
    args = ("-m", tiny_model, "--max-new-tokens", "2", "--json")
    asked = kvloom.ok("ask", "What did barge 2 carry?", "-", *args, stdin=lines).json
    assert (asked["documents"], asked["trace"]["prefilled_tokens"]) == (["1", "2", "3"], 0)
    asked = kvloom.ok("ask", "-", texts, *args, stdin="Who owned\nthe mill?\n").json
    assert asked["question"] == "Who owned\nthe mill?"


def test_with_more_documents_than_top_bm25_picks(kvloom: Kvloom, tiny_model: Path, many: Path) -> None:
    args = (
        "ask",
        "What did barge 41 and barge 17 carry?",
        many,
        "-m",
        tiny_model,
        "--max-new-tokens",
        "1",
        "--json",
    )
    assert kvloom.ok(*args, "--top", "2").json["documents"] == ["d17", "d41"]
    assert len(kvloom.ok(*args).json["documents"]) == 8


def test_sampling_is_repeatable_and_stops_at_a_text(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    args = ("ask", "Who?", texts, "-m", tiny_model, "--json", "--max-new-tokens", "12", "--store", "memory:")
    hot = ("--temperature", "3", "--top-k", "50", "--top-p", "0.99", "--seed")
    one, same, other = (kvloom.ok(*args, *hot, seed).json["token_ids"] for seed in "112")
    assert one == same != other
    text = kvloom.ok(*args).json["answer"]
    stopped = kvloom.ok(*args, "--stop", text[1:3]).json
    assert stopped["answer"] == text[: text.index(text[1:3])]
    assert stopped["trace"]["finish_reason"] == "stop"


def test_smaller_chunks_and_another_dtype_are_stored_apart(
    kvloom: Kvloom, tiny_model: Path, many: Path
) -> None:
    text = " ".join(json.loads(line)["text"] for line in many.read_text().splitlines()[:20])
    one = kvloom.ok("index", "-", "-m", tiny_model, "--json", stdin=text).json
    small = kvloom.ok("index", "-", "-m", tiny_model, "--json", "--chunk-tokens", "64", stdin=text).json
    half = kvloom.ok(
        "index", "-", "-m", tiny_model, "--json", "--dtype", "bfloat16", "--device", "cpu", stdin=text
    ).json
    assert (one["chunks"], one["new"], half["chunks"], half["new"]) == (1, 1, 1, 1)
    assert small["chunks"] == small["new"] > 5
    assert small["tokens"] >= one["tokens"]
    assert half["store_bytes"] - small["store_bytes"] < one["store_bytes"] * 0.6


def test_one_token_and_odd_names(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    (texts / "one.txt").write_text("a")
    (texts / os.fsdecode(b"odd\xff.txt")).write_text("The abbot kept bees.")
    asked = kvloom.ok(
        "ask", "What did the abbot keep?", texts, "-m", tiny_model, "--max-new-tokens", "1", "--json"
    )
    assert len(asked.json["documents"]) == 5
    assert "one.txt" in asked.json["documents"]


def test_only_a_terminal_sees_a_bar(kvloom: Kvloom, tiny_model: Path, many: Path) -> None:
    master, slave = pty.openpty()
    start = kvloom.start(
        "index", many, "-m", tiny_model, patch="slow_disk", stderr=os.ttyname(slave), env={"TERM": "xterm"}
    )
    seen = b""

    def has_bar() -> bool:
        nonlocal seen
        seen += os.read(master, 4096)
        return b"indexing" in seen

    wait_until(has_bar)
    reader = threading.Thread(target=drain, args=(master,), daemon=True)  # or the bar fills the terminal
    reader.start()
    done = start()
    assert done.code == 0
    assert "60 new" in done.stdout
    assert "\x1b" not in done.stdout
    os.close(slave)
    reader.join(timeout=10)
    os.close(master)


def drain(terminal: int) -> None:
    """Reads until the other side is closed."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


def test_a_closed_pipe_is_no_error(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    done = kvloom("methods", closed_stdout=True)
    assert (done.code, done.stderr) == (141, "")
    done = kvloom("ask", "Who?", texts, "-m", tiny_model, closed_stdout=True)
    assert (done.code, done.stderr) == (141, "")


def test_a_bug_is_one_sentence_that_says_how_to_see_more(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    sentence = kvloom.refused("index", texts, "-m", tiny_model, code=1, patch="bug")
    assert sentence.startswith("unexpected ZeroDivisionError: a bug; ")
    assert "KVLOOM_TRACEBACK=1" in sentence
    done = kvloom("index", texts, "-m", tiny_model, patch="bug", env={"KVLOOM_TRACEBACK": "1"})
    assert done.code == 1
    assert 'raise ZeroDivisionError("a bug")' in done.stderr


@pytest.mark.parametrize("command", ["index", "ask"])
def test_a_damaged_entry_is_set_aside_and_computed_again(
    kvloom: Kvloom, tiny_model: Path, texts: Path, command: str
) -> None:
    kvloom.ok("index", texts, "-m", tiny_model)
    args = ("ask", "Who built the bridge?", texts, "-m", tiny_model, "--max-new-tokens", "4", "--json")
    before = kvloom.ok(*args).json
    victim = max(entries(kvloom.store), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[-100] ^= 1
    victim.write_bytes(content)
    if command == "index":  # which does not read what is there, but verify does
        bad = kvloom("store", "verify", "--json")
        assert (bad.code, bad.json["read"], [entry["key"] for entry in bad.json["bad"]]) == (
            1,
            4,
            [victim.stem],
        )
        assert "checksum" in bad.sentence
        assert kvloom.ok("index", texts, "-m", tiny_model, "--json").json["new"] == 1
        after = kvloom.ok(*args)
    else:
        after = kvloom.ok(*args)
        assert re.search(f"{victim.stem} is damaged: its checksum .*; it is set aside", after.sentence)
        assert after.json["trace"]["prefilled_tokens"] > 0
    assert after.json["token_ids"] == before["token_ids"]
    assert kvloom.ok("store", "stats", "--json").json["quarantined"] == 1
    assert kvloom.ok("store", "verify").stdout == "4 entries read, 0 bad\n"


def test_chunks_and_prompts_are_compressed(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    half = ("--chunk-compressor", "knorm:keep=0.5")
    whole = kvloom.ok("index", texts, "-m", tiny_model, "--json").json
    small = kvloom.ok("index", texts, "-m", tiny_model, *half, "--json").json
    assert small["new"] == 3, "entries of their own"
    assert small["store_bytes"] - whole["store_bytes"] < 0.6 * whole["store_bytes"]
    args = ("ask", "Who built the bridge?", texts, "-m", tiny_model, "--max-new-tokens", "3", "--json")
    plain = kvloom.ok(*args).json["trace"]
    halved = kvloom.ok(*args, *half).json["trace"]
    assert halved["prefilled_tokens"] == 0
    assert halved["kv_bytes"] < 0.75 * plain["kv_bytes"]
    dropped = kvloom.ok(*args, "-c", "snapkv:keep=0.4,window=8").json["trace"]
    (done,) = dropped["compressions"]
    assert done["bytes_after"] < 0.5 * done["bytes_before"]
    for wrong in ("knorm:keep=2", "knorn", "rpc"):
        for option in ("-c", "--chunk-compressor"):
            kvloom.refused(*args, option, wrong)


def test_explain_says_of_each_chunk_where_it_was_or_why_not(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    args = ("ask", "Who built the bridge?", texts, "-m", tiny_model, "--max-new-tokens", "1")
    first = kvloom.ok(*args, "--explain").stderr
    assert first.count("miss, never stored") == 4  # the header and three chunks
    assert kvloom.ok(*args, "--explain").stderr.count(": hit, disk, ") == 4
    damaged = entries(kvloom.store)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    told = kvloom.ok(*args, "--json").json["trace"]["lookups"]
    assert sorted(found["hit"] for found in told) == [False, True, True, True]
    (miss,) = [found for found in told if not found["hit"]]
    assert (miss["key"], miss["reason"]) == (damaged.name.partition(".")[0], "damaged")
