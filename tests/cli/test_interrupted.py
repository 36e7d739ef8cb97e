"""Several processes in one store, and processes that end early: nothing is lost but what was not done."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from command_line import entries, interrupt, leftovers, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


def test_ctrl_c_while_indexing_keeps_what_is_stored(kvloom: Kvloom, tiny_model: Path, many: Path) -> None:
    start = kvloom.start("index", many, "-m", tiny_model, patch="slow_disk")
    wait_until(lambda: len(entries(kvloom.store)) > 4)
    interrupt(start.pid)
    done = start()
    assert (done.code, done.stdout) == (130, "")
    stored_tokens = r"([\d,]+) of ([\d,]+) tokens to compute are stored"
    sentence = rf"kvloom: interrupted: {stored_tokens}; run the same command again to continue"
    found = re.fullmatch(sentence, done.sentence)
    assert found is not None, done.sentence
    stored, total = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < stored < total
    assert leftovers(kvloom.store) == []
    kept = len(entries(kvloom.store)) - 1  # the header is one of them
    assert kvloom.ok("store", "verify").stdout == f"{kept + 1} entries read, 0 bad\n"

    again = kvloom.ok("index", many, "-m", tiny_model, "--json").json
    assert (again["new"], again["already_stored"]) == (60 - kept, kept)
    # the last chunk may have been stored after it was last counted
    assert total - again["computed_tokens"] - stored in (0, total // 60, total // 60 + 1, total // 60 - 1)


def test_ctrl_c_before_anything_is_stored(kvloom: Kvloom, tiny_model: Path, many: Path) -> None:
    start = kvloom.start("ask", "-", many, "-m", tiny_model, stdin="Which barge?", patch="slow_disk")
    wait_until(lambda: len(entries(kvloom.store)) > 0)
    interrupt(start.pid)
    done = start()
    assert (done.code, done.stdout, done.stderr) == (130, "", "kvloom: interrupted\n")
    assert leftovers(kvloom.store) == []


def test_two_processes_index_the_same_folder_at_once(kvloom: Kvloom, tiny_model: Path, many: Path) -> None:
    both = [kvloom.start("index", many, "-m", tiny_model, "--json", patch="slow_disk") for _ in range(2)]
    done = [start() for start in both]
    assert [(each.code, each.stderr) for each in done] == [(0, ""), (0, "")]
    assert all(each.json["chunks"] == 60 for each in done)
    assert kvloom.ok("store", "verify").stdout == "61 entries read, 0 bad\n"
    assert leftovers(kvloom.store) == []


def test_no_space_on_the_disk(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    args = ("-m", tiny_model, "--store", "disk:stored")
    sentence = kvloom.refused("index", texts, *args, code=1, patch="full_disk")
    assert re.fullmatch(
        "cannot write to .*/stored: no space left on device: free space or choose another store with --store",
        sentence,
    )
    assert entries(kvloom.folder / "stored") == leftovers(kvloom.folder / "stored") == []
    asked = kvloom.ok("ask", "Who?", texts, *args, "--json", "--max-new-tokens", "1", patch="full_disk")
    assert "a computed chunk was not stored: cannot write to" in asked.sentence  # said once
    assert len(asked.json["token_ids"]) <= 1


def test_a_store_that_cannot_be_written_or_made(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    sentence = kvloom.refused("index", texts, "-m", tiny_model, code=1, patch="read_only")
    assert "read-only file system: make it writable or choose another store with --store" in sentence
    kvloom.ok("index", texts, "-m", tiny_model)
    (texts / "new.txt").write_text("The weaver sold the mill again.")
    asked = kvloom.ok(
        "ask", "Who?", texts, "-m", tiny_model, "--json", "--max-new-tokens", "1", patch="read_only"
    )
    assert asked.json["trace"]["reused_tokens"] > asked.json["trace"]["prefilled_tokens"] > 0
    assert "a computed chunk was not stored" in asked.sentence
    sentence = kvloom.refused(
        "index", texts, "-m", tiny_model, "--store", f"disk:{texts / 'new.txt'}", code=1
    )
    assert sentence == f"cannot open {texts / 'new.txt'}: it is a file; name a folder with --store"
