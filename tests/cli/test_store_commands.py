"""kvloom store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from command_line import entries

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom


def test_an_empty_store(kvloom: Kvloom) -> None:
    stats = kvloom.ok("store", "stats", "--json").json
    assert (stats["where"], stats["entries"], stats["num_bytes"], stats["quarantined"]) == (
        str(kvloom.store),
        0,
        0,
        0,
    )
    assert kvloom.ok("store", "list").stdout == ""
    assert kvloom.ok("store", "list", "--json").json == []
    assert kvloom.ok("store", "verify").stdout == "0 entries read, 0 bad\n"
    assert kvloom.ok("store", "rm", "--all", "--yes").stdout == "0 entries removed\n"


def test_stats_list_and_rm(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    indexed = kvloom.ok("index", texts, "-m", tiny_model, "--json").json
    listed = kvloom.ok("store", "list", "--json").json
    assert [entry["key"] for entry in listed] == [path.stem for path in entries(kvloom.store)]
    assert [entry["num_bytes"] for entry in listed] == [path.stat().st_size for path in entries(kvloom.store)]
    header = next(entry for entry in listed if entry["start"] == 0)
    assert sum(entry["num_tokens"] for entry in listed) == indexed["tokens"] + header["num_tokens"]
    assert {entry["start"] for entry in listed} == {0, header["num_tokens"]}
    assert len({entry["fingerprint"] for entry in listed}) == 1
    lines = kvloom.ok("store", "list").stdout.splitlines()
    assert len(lines) == 5
    assert lines[1].split()[0] == listed[0]["key"][:16]
    stats = kvloom.ok("store", "stats").stdout.splitlines()
    assert stats[1].split() == ["entries", "4"]
    assert stats[3].split() == ["limit", "none"]

    key = listed[0]["key"]
    assert kvloom.refused("store", "rm", key[:5]).startswith(
        f"key '{key[:5]}' is too short; give at least its first 6"
    )
    assert kvloom.refused("store", "rm", "ffffff0").startswith("no entry's key begins with 'ffffff0'; ")
    assert kvloom.refused("store", "rm", key, "--all", "--yes").startswith("name the entries to remove")
    assert kvloom.ok("store", "rm", key[:6].upper(), key, "--json").json == {
        "removed": [key],
        "documents": [],
    }
    assert kvloom.ok("store", "stats", "--json").json["entries"] == 3
    assert kvloom.ok("store", "rm", "--all", "--yes").stdout == "3 entries removed\n"
    assert entries(kvloom.store) == []


def test_a_prefix_of_two_keys_is_refused(kvloom: Kvloom) -> None:
    for last in "ab":
        path = kvloom.store / "ab" / f"{'ab' * 31}a{last}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert kvloom.refused("store", "rm", "ababab") == "2 keys begin with 'ababab'; give more characters"


def test_list_reads_heads_only_and_names_what_is_damaged(
    kvloom: Kvloom, tiny_model: Path, texts: Path
) -> None:
    kvloom.ok("index", texts, "-m", tiny_model)
    unread, damaged, *_ = entries(kvloom.store)
    content = bytearray(unread.read_bytes())
    content[-1] ^= 1  # of a tensor, which list does not read
    unread.write_bytes(content)
    damaged.write_bytes(damaged.read_bytes()[:100])
    done = kvloom.ok("store", "list", "--json")
    assert [entry["key"] for entry in done.json] == [
        path.stem for path in (unread, *entries(kvloom.store)[1:])
    ]
    assert f"entry {damaged.stem} is damaged: " in done.sentence
    assert kvloom("store", "verify").code == 1
    assert kvloom.ok("store", "stats", "--json").json["quarantined"] == 2
