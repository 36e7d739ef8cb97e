"""The index is a cache of what the files say: whatever happens to it, answers stay right."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import stat
import threading
import time

import pytest

from kvloom.store import DiskStore, files
from kvloom.store import index as index_module
from kvloom.store.lookup import Miss


@pytest.fixture
def store(tmp_path) -> DiskStore:
    return DiskStore(tmp_path / "chunks")


def rows(store: DiskStore) -> dict:
    chunks = store.index.chunks()
    assert chunks is not None
    return {chunk.key: chunk for chunk in chunks}


def without_times(store: DiskStore) -> dict:
    return {
        key: (chunk.num_bytes, chunk.num_tokens, chunk.fingerprint, chunk.start, chunk.pinned)
        for key, chunk in rows(store).items()
    }


def remove_index(store: DiskStore) -> None:
    store.index.close()
    for path in store.path.glob("index.sqlite*"):
        path.unlink()


def test_the_index_says_of_each_entry_what_its_file_says(store, make_chunk, make_key):
    before = time.time()
    store.put(make_key(0), make_chunk(tokens=5))
    chunk = rows(store)[make_key(0)]
    size = (store.path / make_key(0)[:2] / f"{make_key(0)}.safetensors").stat().st_size
    assert (chunk.num_bytes, chunk.num_tokens, chunk.fingerprint, chunk.start) == (size, 5, "model-a", 7)
    assert before <= chunk.created == chunk.last_used <= time.time()
    assert store.index.num_bytes() == size
    store.put(make_key(0), make_chunk(tokens=9))
    assert rows(store)[make_key(0)].num_tokens == 9
    assert store.index.num_bytes() == rows(store)[make_key(0)].num_bytes > size
    store.delete(make_key(0))
    assert (rows(store), store.index.num_bytes()) == ({}, 0)


def test_rebuild_remakes_the_index_from_the_files_alone(store, make_chunk, make_key):
    for number in range(20):
        store.put(make_key(number), make_chunk(number, tokens=number + 1))
    store.pin(make_key(3))
    expected = without_times(store)
    assert len(expected) == 20
    remove_index(store)
    reopened = DiskStore(store.path)
    assert rows(reopened) == {}
    progress: list[int] = []
    assert reopened.rebuild(progress.append) == 20
    assert progress == list(range(1, 21))
    assert without_times(reopened) == expected
    assert reopened.index.num_bytes() == store.stats().num_bytes


def test_rebuild_forgets_what_is_gone_and_sets_aside_what_is_damaged(store, make_chunk, make_key):
    for number in range(3):
        store.put(make_key(number), make_chunk())
    (store.path / make_key(0)[:2] / f"{make_key(0)}.safetensors").unlink()
    os.truncate(store.path / make_key(1)[:2] / f"{make_key(1)}.safetensors", 100)
    assert store.rebuild() == 1
    assert set(rows(store)) == {make_key(2)}
    assert store.absence(make_key(0))[0] is Miss.VANISHED
    assert store.absence(make_key(1))[0] is Miss.DAMAGED
    assert store.stats().quarantined == 1


def test_last_use_is_known_to_the_files_too(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())
    path = store.path / make_key(0)[:2] / f"{make_key(0)}.safetensors"
    os.utime(path, (1000, 1000))
    with monkeypatch.context() as patch:  # a time that no file system would set by itself
        patch.setattr(files.time, "time_ns", lambda: 5000 * 10**9)
        assert store.get(make_key(0)) is not None
    assert (path.stat().st_atime, path.stat().st_mtime) == (5000, 1000)
    remove_index(store)
    store.reconcile()
    assert (rows(store)[make_key(0)].last_used, rows(store)[make_key(0)].created) == (5000, 1000)


def test_entries_written_without_the_index_are_served(store, make_chunk, make_key, assert_same, tmp_path):
    other = DiskStore(tmp_path / "other")
    other.put(make_key(1), make_chunk(4.0))
    store.put(make_key(0), make_chunk())
    shutil.copytree(other.path / make_key(1)[:2], store.path / make_key(1)[:2], dirs_exist_ok=True)
    assert make_key(1) not in rows(store)
    assert_same(store.get(make_key(1)), make_chunk(4.0))
    assert set(store.keys()) == {make_key(0), make_key(1)}
    assert store.stats().entries == 2
    store.reconcile()
    assert rows(store)[make_key(1)].num_tokens is None  # its head is read by a rebuild
    store.rebuild()
    assert rows(store)[make_key(1)].num_tokens == 3


GARBAGE = b"this is not a database" * 1000


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_damaged_index_is_made_anew(store, make_chunk, make_key, assert_same, caplog, when):
    for number in range(3):
        store.put(make_key(number), make_chunk(number))
    store.index.close()
    path = store.path / "index.sqlite"
    reader = DiskStore(store.path)
    if when == "while it is open":
        assert reader.index.num_bytes()
        reader.index._identity, kept = None, reader.index._identity
        reader.index._identity = kept
    path.write_bytes(GARBAGE)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert_same(reader.get(make_key(number)), make_chunk(number))
        reader.put(make_key(3), make_chunk(3))
    assert set(reader.keys()) == {make_key(number) for number in range(4)}
    fresh = DiskStore(store.path)
    assert fresh.rebuild() == 4
    assert set(rows(fresh)) == set(fresh.keys())
    assert any("index is damaged" in record.getMessage() for record in caplog.records) or when != (
        "before it is opened"
    )


def test_an_index_of_other_tables_is_made_anew(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    store.index.close()
    with sqlite3.connect(store.path / "index.sqlite") as db:
        db.execute("DROP TABLE chunks")
    db.close()
    reopened = DiskStore(store.path)
    assert reopened.rebuild() == 1
    assert set(rows(reopened)) == {make_key(0)}
    assert (store.path / "index.sqlite.damaged").exists()


def test_an_index_of_an_earlier_version_is_made_anew_in_place(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    store.documents.record("a", [make_key(0)], recipe="r", num_tokens=3)
    store.index.close()
    with sqlite3.connect(store.path / "index.sqlite") as db:
        db.execute("DROP TABLE documents")
        db.execute("CREATE TABLE documents (id TEXT PRIMARY KEY)")
        db.execute("PRAGMA user_version = 1")
    db.close()
    reopened = DiskStore(store.path)
    assert reopened.absence(make_key(1))[0] is Miss.UNKNOWN  # it has not seen everything from the start
    (document,) = reopened.documents.all()
    assert (document.id, document.recipe, document.num_tokens) == ("a", "r", 3)
    assert reopened.rebuild() == 1
    assert set(rows(reopened)) == {make_key(0)}
    assert not (store.path / "index.sqlite.damaged").exists()


def test_an_index_of_a_later_version_is_left_alone(store, make_chunk, make_key, assert_same, caplog):
    store.put(make_key(0), make_chunk())
    store.index.close()
    db = sqlite3.connect(store.path / "index.sqlite")
    db.execute("PRAGMA user_version = 4")
    db.commit()
    db.close()
    reopened = DiskStore(store.path, quota_bytes=10**6)
    with caplog.at_level(logging.WARNING):
        reopened.put(make_key(1), make_chunk(2.0))
    assert_same(reopened.get(make_key(1)), make_chunk(2.0))
    assert reopened.index.num_bytes() is None
    assert "its version is 4, beyond 3; update kvloom" in caplog.text
    assert sqlite3.connect(store.path / "index.sqlite").execute("PRAGMA user_version").fetchone() == (4,)
    assert reopened.absence(make_key(5))[0] is Miss.UNKNOWN


def test_a_locked_index_costs_a_moment_once(store, make_chunk, make_key, assert_same, monkeypatch):
    monkeypatch.setattr(index_module, "BUSY_S", 0.2)
    store.put(make_key(0), make_chunk())
    store.index.close()
    holder = sqlite3.connect(store.path / "index.sqlite", isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    try:
        start = time.perf_counter()
        store.put(make_key(1), make_chunk(2.0))
        assert 0.1 < time.perf_counter() - start < 2
        start = time.perf_counter()
        for number in range(2, 12):
            store.put(make_key(number), make_chunk(number))
            assert_same(store.get(make_key(number)), make_chunk(number))
        assert store.absence(make_key(99)) == (Miss.UNKNOWN, "")
        assert time.perf_counter() - start < 2
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    store.index._asleep_until = 0
    store.rebuild()
    assert len(rows(store)) == 12


def test_a_folder_that_vanished_is_made_anew_with_its_index(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    shutil.rmtree(store.path)
    assert store.get(make_key(0)) is None
    store.put(make_key(1), make_chunk())
    assert store.get(make_key(1)) is not None
    assert set(rows(store)) == {make_key(1)}


def test_the_index_is_private(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.path.glob("index.sqlite*")}
    assert found == dict.fromkeys(["index.sqlite", "index.sqlite-shm", "index.sqlite-wal"], 0o600)


def test_threads_and_stores_of_one_folder_share_the_index(store, make_chunk, make_key):
    stores = [store, DiskStore(store.path)]

    def work(first: int) -> None:
        for number in range(first, first + 10):
            stores[first % 2].put(make_key(number), make_chunk())
            assert stores[1 - first % 2].get(make_key(number)) is not None

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 11, 30, 41)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows(store)) == 40
    assert store.index.num_bytes() == store.stats().num_bytes


def test_a_forked_process_opens_the_index_for_itself(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.put(make_key(1), make_chunk())
            code = 0 if len(rows(store)) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(rows(store)) == {make_key(0), make_key(1)}


def test_the_memory_of_what_is_gone_is_bounded(store, make_chunk, make_key, monkeypatch):
    monkeypatch.setattr(index_module, "MAX_GONE", 5)
    for number in range(30):
        store.index.remove(make_key(number), "evicted")
    store.index.remove("000" + "a" * 61, "evicted")
    count = store.index.run(lambda db: db.execute("SELECT count(*) FROM gone").fetchone()[0])
    assert count == 5
    assert store.absence(make_key(0))[0] is Miss.NEVER_STORED
    assert store.absence(make_key(29))[0] is Miss.EVICTED
