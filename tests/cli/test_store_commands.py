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
    assert kvloom.ok("store", "rm", "--all", "--yes").stdout == "3 documents and 3 entries removed\n"
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


def test_list_and_show_say_how_entries_are_written(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    key_file = kvloom.folder / "store.key"
    key_file.write_text("ab" * 32)
    for codec, options in (("int8+zstd", ""), ("bf16", f"&key_file={key_file}")):
        url = f"disk:{kvloom.folder}/kv-{codec}?codec={codec}{options}"
        kvloom.ok("index", texts, "-m", tiny_model, "--store", url)
        listed = kvloom.ok("store", "list", "--store", url, "--json").json
        assert {(entry["codec"], entry["is_encrypted"]) for entry in listed} == {(codec, bool(options))}
        lines = kvloom.ok("store", "list", "--store", url).stdout.splitlines()
        assert [line.split()[-2] for line in lines] == ["codec", *[codec] * len(listed)]
        shown = kvloom.ok("store", "show", listed[0]["key"], "--store", url, "--json").json
        assert (shown["codec"], shown["encrypted"]) == (codec, bool(options))
        assert (
            kvloom.ok("index", texts, "-m", tiny_model, "--store", url, "--json").json["computed_tokens"] == 0
        )
    assert kvloom.refused("store", "stats", "--store", "disk:x?codec=int9").startswith("unknown codec 'int9'")


def test_a_namespace_has_entries_of_its_own(kvloom: Kvloom, tiny_model: Path, texts: Path) -> None:
    question = ("ask", "Why?", texts, "-m", tiny_model, "--max-new-tokens", "1", "--json")
    kvloom.ok("index", texts, "-m", tiny_model, "--namespace", "acme")
    assert entries(kvloom.store) == []
    assert kvloom.ok("store", "stats", "--json").json["entries"] == 0
    for name, reused in (("acme", True), ("zeta", False)):
        trace = kvloom.ok(*question, "--namespace", name).json["trace"]
        assert (trace["prefilled_tokens"] == 0) is reused
    keys = {}
    for name in ("acme", "zeta"):
        listed = kvloom.ok("store", "list", "--namespace", name, "--json").json
        keys[name] = {entry["key"] for entry in listed}
        assert (
            len(keys[name]) == kvloom.ok("store", "stats", "--namespace", name, "--json").json["entries"] > 0
        )
        assert kvloom.ok("store", "verify", "--namespace", name).code == 0
    assert not keys["acme"] & keys["zeta"]
    key = min(keys["acme"])
    assert kvloom.refused("store", "show", key, "--namespace", "zeta").startswith(f"{key} is not stored: ")
    assert kvloom.refused("store", "rm", key).startswith(f"no entry's key begins with '{key}'")
    removed = kvloom.ok("store", "rm", "--all", "--yes", "--namespace", "acme", "--json").json["removed"]
    assert set(removed) == keys["acme"]
    assert kvloom.ok("store", "stats", "--namespace", "zeta", "--json").json["entries"] == len(keys["zeta"])
    assert kvloom.refused("store", "stats", "--namespace", "").startswith(
        "store 'disk': option 'namespace': "
    )
