"""kvloom store add, reindex, show, list --documents, rm, pin and rebuild."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from command_line import entries

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Kvloom

LONG = " ".join(f"word{number}" for number in range(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents of several chunks, of which they share the first."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{LONG}\n\nThe end of {name}.")
    return folder


def add(kvloom: Kvloom, source: Path | str, model: Path, **options: str) -> list[dict]:
    done = kvloom.ok("store", "add", source, "-m", model, "--chunk-tokens", "64", "--json", **options)
    return done.json["documents"]


def stored(kvloom: Kvloom) -> set[str]:
    return {path.stem for path in entries(kvloom.store)}


def test_add_list_show_replace_and_remove(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    first = {document["id"]: document for document in add(kvloom, folder, tiny_model)}
    assert set(first) == {"a.txt", "b.txt"}
    a, b = first["a.txt"]["keys"], first["b.txt"]["keys"]
    assert len(a) > 2
    shared = set(a) & set(b)
    assert shared
    assert len(stored(kvloom)) == len(set(a) | set(b)) + 1  # and the header
    assert all(document["is_new"] for document in first.values())

    listed = kvloom.ok("store", "list", "--documents", "--json").json
    assert [(document["id"], document["keys"]) for document in listed] == [("a.txt", a), ("b.txt", b)]
    assert {document["source"] for document in listed} == {str(folder)}
    lines = kvloom.ok("store", "list", "--documents").stdout.splitlines()
    assert lines[1].split() == ["a.txt", str(len(a)), str(folder)]

    shown = kvloom.ok("store", "show", "a.txt", "--json").json
    assert [chunk["key"] for chunk in shown["chunks"]] == a
    assert all(chunk["stored"] for chunk in shown["chunks"])
    only = next(key for key in a if key not in shared)
    assert kvloom.ok("store", "show", only[:10], "--json").json["documents"] == ["a.txt"]
    assert kvloom.ok("store", "show", a[0], "--json").json["documents"] == ["a.txt", "b.txt"]
    assert kvloom.ok("store", "show", "a.txt").stdout.splitlines()[-1] == f"  {a[-1][:16]}  stored"

    (folder / "a.txt").write_text(f"{LONG}\n\nAnother end.")
    (changed,) = [document for document in add(kvloom, folder, tiny_model) if document["new"]]
    assert (changed["id"], changed["is_new"]) == ("a.txt", False)
    assert set(changed["new"]).isdisjoint(a)
    assert set(changed["freed"]) == set(a) - set(changed["keys"]) - set(b)
    assert changed["freed"]
    assert stored(kvloom).isdisjoint(changed["freed"])

    gone = kvloom.ok("store", "rm", "a.txt", "--json").json
    assert gone["documents"] == ["a.txt"]
    assert set(gone["removed"]) == set(changed["keys"]) - set(b)
    assert set(b) <= stored(kvloom)
    assert kvloom.refused("store", "rm", "no such") == (
        "no entry's key begins with 'no such'; see kvloom store list"
    )
    assert kvloom.ok("store", "rm", "--all", "--yes").stdout.startswith("1 document and ")
    assert stored(kvloom) == set()
    assert kvloom.ok("store", "list", "--documents").stdout == ""


def test_adding_again_computes_nothing(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    add(kvloom, folder, tiny_model)
    before = {path: path.stat().st_mtime_ns for path in entries(kvloom.store)}
    again = add(kvloom, folder, tiny_model)
    assert [(document["new"], document["freed"]) for document in again] == [([], []), ([], [])]
    assert {path: path.stat().st_mtime_ns for path in entries(kvloom.store)} == before
    done = kvloom.ok("store", "add", folder, "-m", tiny_model, "--chunk-tokens", "64")
    assert done.stdout == "2 documents: 0 new, 0 replaced, 2 unchanged; 0 chunks new, 0 freed\n"


def test_reindex_reads_the_sources_again(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    add(kvloom, folder, tiny_model)
    (folder / "a.txt").write_text("Short now.")
    (folder / "b.txt").unlink()
    (folder / "c.txt").write_text("Not added yet.")
    command = ("store", "reindex", "-m", tiny_model, "--chunk-tokens", "64")
    done = kvloom.ok(*command, "--json")
    assert [document["id"] for document in done.json["documents"]] == ["a.txt"]
    assert done.json["documents"][0]["new"]
    assert done.sentence == (
        f"kvloom: left as it is: b.txt is not in {folder} any more; kvloom store rm removes it"
    )
    assert [document["id"] for document in kvloom.ok("store", "list", "--documents", "--json").json] == [
        "a.txt",
        "b.txt",
    ]
    assert kvloom.refused(*command, "x") == "there is no document 'x'; see kvloom store list --documents"
    shutil.rmtree(folder)
    done = kvloom.ok(*command)
    assert done.stdout.startswith("0 documents")
    assert "left as they are: 2 documents: " in done.sentence


def test_documents_from_standard_input_have_no_source(kvloom: Kvloom, tiny_model: Path) -> None:
    (document,) = add(kvloom, "-", tiny_model, stdin="A text.")
    command = ("store", "reindex", document["id"], "-m", tiny_model)
    assert kvloom.refused(*command) == f"document '{document['id']}' came from no file; add it again"
    assert kvloom.ok("store", "reindex", "-m", tiny_model, "--json").json == {"documents": []}


def test_pin_unpin_and_rebuild(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    keys = add(kvloom, folder, tiny_model)[0]["keys"]
    assert kvloom.ok("store", "pin", "a.txt").stdout == f"{len(set(keys))} entries pinned\n"
    assert kvloom.ok("store", "stats", "--json").json["pinned"] == len(set(keys))
    assert kvloom.ok("store", "unpin", keys[0][:8], "--json").json == {"unpinned": [keys[0]]}
    assert kvloom.ok("store", "unpin", keys[0]).stdout == "0 entries unpinned\n"
    for path in kvloom.store.glob("index.sqlite*"):
        path.unlink()
    rebuilt = kvloom.ok("store", "rebuild", "--json").json
    assert (rebuilt["entries"], rebuilt["documents"]) == (len(stored(kvloom)), 2)
    assert kvloom.ok("store", "show", keys[1], "--json").json["pinned"] is True
    assert kvloom.ok("store", "show", keys[0], "--json").json["pinned"] is False


def test_a_quota_evicts_and_show_says_so(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    keys = add(kvloom, folder, tiny_model)[0]["keys"]
    held = kvloom.ok("store", "stats", "--json").json["num_bytes"]
    url = f"disk:{kvloom.store}?quota={held}"
    (folder / "z.txt").write_text("One more document.")
    add(kvloom, folder / "z.txt", tiny_model, env={"KVLOOM_STORE": url})
    assert kvloom.ok("store", "stats", "--store", url, "--json").json["num_bytes"] <= held
    shown = [kvloom.ok("store", "show", name, "--json").json["chunks"] for name in ("a.txt", "b.txt")]
    reasons = [chunk["reason"] for chunks in shown for chunk in chunks]
    assert "evicted" in reasons
    gone = next(chunk["key"] for chunks in shown for chunk in chunks if not chunk["stored"])
    assert kvloom.refused("store", "show", gone) == (
        f"{gone} is not stored: evicted: to stay within the quota"
    )
    again = add(kvloom, folder, tiny_model)
    assert again[0]["keys"] == keys
    assert all(chunk["stored"] for chunk in kvloom.ok("store", "show", "a.txt", "--json").json["chunks"])


def test_tiers_on_the_command_line(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    url = f"memory:1MiB,disk:{kvloom.store},redis://127.0.0.1:1/0"
    documents = add(kvloom, folder, tiny_model, env={"KVLOOM_STORE": url})
    assert {key for document in documents for key in document["keys"]} <= stored(kvloom)
    stats = kvloom.ok("store", "stats", "--store", url, "--json").json
    assert [(tier["name"], tier["entries"] is None) for tier in stats["tiers"]] == [
        ("memory", False),
        ("disk", False),
        ("redis", True),
    ]
    assert kvloom.refused("store", "stats", "--store", "memory:,memory:1GiB") == (
        "store 'memory:,memory:1GiB' lives and ends with one process; name one that lasts, such as disk:PATH"
    )
    assert kvloom.refused("store", "stats", "--store", "disk:x?size=1") == (
        "store 'disk' has no option 'size'; "
        "there are: codec, deadline, encrypted_only, key_file, namespace, quota, sweep_after"
    )


def test_documents_of_a_namespace(kvloom: Kvloom, tiny_model: Path, folder: Path) -> None:
    add(kvloom, folder, tiny_model)
    (folder / "b.txt").unlink()
    ours = ("--namespace", "acme")
    command = ("store", "add", folder, "-m", tiny_model, "--chunk-tokens", "64", "--json", *ours)
    (document,) = kvloom.ok(*command).json["documents"]
    assert document["is_new"]
    assert not set(document["keys"]) & stored(kvloom)
    listed = kvloom.ok("store", "list", "--documents", *ours, "--json").json
    assert [found["id"] for found in listed] == ["a.txt"]
    assert len(kvloom.ok("store", "list", "--documents", "--json").json) == 2
    assert kvloom.refused("store", "rm", "b.txt", *ours).startswith("key 'b.txt' is too short")
    assert kvloom.ok("store", "pin", "a.txt", *ours).stdout.endswith(" pinned\n")
    assert kvloom.ok("store", "stats", "--json").json["pinned"] == 0
    assert kvloom.ok("store", "unpin", "a.txt", *ours).stdout.endswith(" unpinned\n")
    reindexed = kvloom.ok("store", "reindex", "-m", tiny_model, "--chunk-tokens", "64", *ours, "--json").json
    assert [found["keys"] for found in reindexed["documents"]] == [document["keys"]]
    assert kvloom.ok("store", "rebuild", *ours, "--json").json["documents"] == 1
    assert set(kvloom.ok("store", "rm", "a.txt", *ours, "--json").json["removed"]) == set(document["keys"])
    assert len(kvloom.ok("store", "list", "--documents", "--json").json) == 2
