from __future__ import annotations

import json
import logging
import os
import shutil
import threading

import pytest
from filelock import FileLock

from kvloom.errors import DocumentError, StoreError
from kvloom.store import DiskStore, MemoryStore, Store, open_store
from kvloom.store import documents as documents_module
from kvloom.store.documents import Change, content_hash


@pytest.fixture(params=["memory", "disk", "tiers"])
def store(request, tmp_path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    return open_store(f"disk:{tmp_path}/kv" if request.param == "disk" else f"memory:,disk:{tmp_path}/kv")


@pytest.fixture
def disk(tmp_path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


@pytest.fixture
def fill(make_chunk, make_key):
    def fill(store: Store, *numbers: int) -> list[str]:
        for number in numbers:
            store.put(make_key(number), make_chunk(number))
        return [make_key(number) for number in numbers]

    return fill


def test_record_show_list_and_remove(store, fill):
    one, two = fill(store, 1, 2), fill(store, 3)
    documents = store.documents
    change = documents.record("b", one, source="b.txt", content_hash="h", recipe="r", num_tokens=6)
    assert change == Change(new=tuple(one))
    documents.record("a\N{NO-BREAK SPACE}", two)
    documents.remove("a\N{NO-BREAK SPACE}")
    two = fill(store, 3)
    documents.record("a", two)
    found = documents.get("b")
    assert (found.id, found.keys, found.source, found.content_hash) == ("b", tuple(one), "b.txt", "h")
    assert (found.recipe, found.num_tokens) == ("r", 6)
    assert documents.all()[1] == found
    assert [document.id for document in store.documents.all()] == ["a", "b"]
    assert documents.get("c") is None
    assert documents.remove("b") == Change(freed=tuple(one))
    assert set(store.keys()) == set(two)
    assert [document.id for document in documents.all()] == ["a"]
    with pytest.raises(DocumentError, match="there is no document 'b'; see kvloom store list --documents"):
        documents.remove("b")


def test_replacing_names_the_new_chunks_and_frees_the_old(store, fill):
    keys = fill(store, 1, 2, 3, 4)
    store.documents.record("a", keys[:3])
    change = store.documents.record("a", [keys[0], keys[3], keys[2]])
    assert change == Change(kept=(keys[0], keys[2]), new=(keys[3],), freed=(keys[1],))
    assert set(store.keys()) == {keys[0], keys[2], keys[3]}
    assert store.documents.get("a").keys == (keys[0], keys[3], keys[2])
    assert len(store.documents.all()) == 1


def test_shared_chunks_are_counted_once_and_go_with_the_last(store, fill):
    keys = fill(store, 1, 2, 3)
    store.documents.record("a", [keys[0], keys[1], keys[0]])
    store.documents.record("b", [keys[1], keys[2]])
    assert store.documents.users(keys) == {keys[0]: 1, keys[1]: 2, keys[2]: 1}
    assert store.stats().entries == 3
    assert store.documents.remove("a").freed == (keys[0],)
    assert keys[1] in store
    assert store.documents.remove("b").freed == (keys[1], keys[2])
    assert list(store.keys()) == []


def test_missing_chunks_are_named(store, fill, make_key):
    keys = fill(store, 1)
    change = store.documents.record("a", [*keys, make_key(9)])
    assert change.missing == (make_key(9),)
    assert store.documents.remove("a").freed == tuple(keys)


@pytest.mark.parametrize("id", ["", "  ", "a\nb", "a\u2028b", "\udcff", None, 3])
def test_an_id_is_a_line_of_text(store, id):
    with pytest.raises(DocumentError, match="is not a line of text; give it one"):
        store.documents.record(id, [])


def test_keys_are_keys(store):
    with pytest.raises(ValueError, match="is not 64 lower-case hexadecimal"):
        store.documents.record("a", ["../x"])
    assert store.documents.all() == []


def test_content_hash_tells_title_from_text():
    assert (
        len({content_hash("ab"), content_hash("b", "a"), content_hash("", "ab"), content_hash("a", "b")}) == 4
    )
    assert content_hash("ab") == content_hash("ab", "") == content_hash("ab", None)


def test_pinned_chunks_are_not_freed(disk, fill):
    keys = fill(disk, 1, 2)
    disk.documents.record("a", keys)
    disk.pin(keys[0])
    assert disk.documents.remove("a").freed == (keys[1],)
    assert list(disk.keys()) == [keys[0]]


def test_freed_chunks_go_from_every_tier(tmp_path, fill):
    store = open_store(f"memory:,disk:{tmp_path}/kv")
    keys = fill(store, 1)
    store.documents.record("a", keys)
    assert [keys[0] in part for part in store.parts] == [True, True]
    store.documents.remove("a")
    assert [keys[0] in part for part in store.parts] == [False, False]


def test_a_store_that_does_not_last_says_so(tmp_path):
    with pytest.raises(
        StoreError, match="has no disk tier, which keeps documents, pins and an index; add disk:PATH"
    ):
        _ = open_store("memory:,memory:").documents
    with pytest.raises(StoreError, match="keeps no documents; use a disk store, such as disk:PATH"):
        _ = open_store(f"fsspec:file://{tmp_path}").parts[0].documents


@pytest.mark.parametrize("loss", ["missing", "damaged", "asleep"])
def test_documents_outlive_the_index(disk, fill, loss):
    keys = fill(disk, 1, 2, 3)
    disk.documents.record("a", keys[:2], source="a.txt", content_hash="h")
    disk.documents.record("b", keys[1:])
    expected = disk.documents.all()
    disk.index.close()
    reopened = DiskStore(disk.path)
    if loss == "missing":
        for path in disk.path.glob("index.sqlite*"):
            path.unlink()
    elif loss == "damaged":
        (disk.path / "index.sqlite").write_bytes(b"no database" * 500)
    else:
        reopened.index._asleep_until = float("inf")
    assert reopened.documents.all() == expected
    assert reopened.documents.users(keys) == {keys[0]: 1, keys[1]: 2, keys[2]: 1}
    assert reopened.documents.remove("a").freed == (keys[0],)
    assert [document.id for document in DiskStore(disk.path).documents.all()] == ["b"]


def test_a_document_that_was_recorded_without_the_index_is_seen(disk, fill):
    keys = fill(disk, 1, 2)
    disk.documents.record("a", keys)
    other = DiskStore(disk.path)
    other.index._asleep_until = float("inf")
    other.documents.record("b", keys[:1])
    assert [document.id for document in disk.documents.all()] == ["a", "b"]
    assert disk.documents.remove("a").freed == (keys[1],)


@pytest.mark.parametrize(
    "fault", ["cut short", "a byte", "another name", "not an object", "deep", "pipe", "unreadable"]
)
def test_a_damaged_document_is_left_out_with_a_warning(disk, fill, caplog, fault):
    keys = fill(disk, 1, 2)
    disk.documents.record("a", keys[:1])
    disk.documents.record("b", keys[1:])
    path = disk.documents._file("a")
    content = path.read_bytes()
    if fault == "cut short":
        path.write_bytes(content[:-20])
    elif fault == "a byte":
        path.write_bytes(content.replace(keys[0].encode(), keys[1].encode()))
    elif fault == "another name":
        path.rename(path.with_name(f"{'0' * 64}.json"))
    elif fault == "not an object":
        path.write_bytes(b"[]")
    elif fault == "deep":
        path.write_bytes(b"[" * 10**5)
    elif fault == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.unlink()
        path.mkdir()
    disk.rebuild()
    with caplog.at_level(logging.WARNING):
        assert [document.id for document in disk.documents._read_all()] == ["b"]
        assert [document.id for document in disk.documents.all()] == ["b"]
        assert disk.documents.get("a") is None
    assert "cannot be used: " in caplog.text
    assert json.loads(content)["id"] == "a"


def test_documents_are_private_files_with_ids_that_cannot_leave_the_folder(disk):
    disk.documents.record("../../etc/passwd", [])
    disk.documents.record("ü" * 300, [])
    files = [path for path in (disk.path / "documents").iterdir() if path.is_file()]
    assert len(files) == 2
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    assert [document.id for document in disk.documents.all()] == ["../../etc/passwd", "ü" * 300]


def test_failures_are_sentences(disk, fill, monkeypatch):
    keys = fill(disk, 1)
    monkeypatch.setattr(documents_module, "PATIENCE_S", 0.1)
    with FileLock(disk.path / "store.lock"), pytest.raises(StoreError, match="is kept by another process"):
        disk.documents.record("a", keys)
    (disk.path / "documents").write_bytes(b"")
    with pytest.raises(
        StoreError, match=r"cannot read .*documents: not a directory; make it a readable folder"
    ):
        disk.documents.record("a", keys)
    (disk.path / "documents").unlink()

    def refuse(*_):
        raise OSError(28, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StoreError, match="no space left on device"):
            disk.documents.record("a", keys)
    assert disk.documents.all() == []
    assert disk.get(keys[0]) is not None


def test_two_stores_record_at_once(disk, fill):
    keys = fill(disk, *range(8))
    stores = [disk, DiskStore(disk.path)]

    def work(number: int) -> None:
        for turn in range(5):
            stores[number % 2].documents.record(f"{number} {turn}", keys[number : number + 2])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(disk.documents.all()) == 20
    assert disk.documents.all() == DiskStore(disk.path).documents._read_all()
    assert disk.documents.users(keys[:2]) == {keys[0]: 5, keys[1]: 10}


def test_the_whole_folder_may_go(disk, fill):
    disk.documents.record("a", fill(disk, 1))
    shutil.rmtree(disk.path / "documents")
    assert disk.documents.all() == []
    disk.documents.record("b", [])
    assert [document.id for document in disk.documents.all()] == ["b"]
