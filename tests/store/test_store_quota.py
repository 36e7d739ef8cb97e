"""A disk store stays within its quota, and what goes is what was used longest ago and not pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

import kvloom
from kvloom.errors import StoreError
from kvloom.store import DiskStore, files
from kvloom.store import eviction as eviction_module
from kvloom.store.lookup import Miss

EVICTOR = Path(__file__).with_name("evictor_process.py")


@pytest.fixture
def size(tmp_path, make_chunk, make_key) -> int:
    """Bytes of an entry of three tokens."""
    store = DiskStore(tmp_path / "measured")
    store.put(make_key(0), make_chunk())
    return store.size_of(make_key(0))


@pytest.fixture
def store(tmp_path, size) -> DiskStore:
    """Room for four entries."""
    return DiskStore(tmp_path / "chunks", quota_bytes=4 * size + size // 2)


def use(store: DiskStore, key: str, when: int) -> None:
    """The entry was last used at that second, as far as index and file know."""
    store.index.flush()
    os.utime(store.path / key[:2] / f"{key}.safetensors", (when, when))
    store.index.run(lambda db: db.execute("UPDATE chunks SET last_used = ? WHERE key = ?", (when, key)))


def without_index(store: DiskStore) -> None:
    store.index.close()
    store.index._asleep_until = float("inf")


def test_an_index_that_was_removed_does_not_hide_what_there_is(store, make_chunk, make_key):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    for number in range(4, 8):
        store.put(make_key(number), make_chunk(number))
    assert sum(path.stat().st_size for path in store.path.glob("*/*.safetensors")) <= store.quota_bytes


def test_files_are_counted_once_where_there_can_be_no_index(store, make_chunk, make_key, monkeypatch):
    without_index(store)
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    counted = []
    monkeypatch.setattr(store, "reconcile", lambda: counted.append(1))
    for number in range(3):
        store.put(make_key(number), make_chunk(number))
    assert counted == [1]


@pytest.mark.parametrize("index", [True, False])
def test_the_least_recently_used_go_first(store, make_chunk, make_key, index):
    if not index:
        without_index(store)
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
        use(store, make_key(number), 1000 + number)
    assert store.get(make_key(0)) is not None  # now the most recently used
    store.put(make_key(4), make_chunk(4))
    assert set(store.keys()) == {make_key(number) for number in (0, 2, 3, 4)}
    store.put(make_key(5), make_chunk(5))
    assert set(store.keys()) == {make_key(number) for number in (0, 3, 4, 5)}
    assert store.stats().num_bytes <= store.quota_bytes == store.stats().limit_bytes


def test_a_miss_says_that_it_was_evicted(store, make_chunk, make_key):
    for number in range(5):
        store.put(make_key(number), make_chunk(number))
    lookup = store.lookup(make_key(0))
    assert (lookup.reason, lookup.detail) == (Miss.EVICTED, "to stay within the quota")
    assert DiskStore(store.path).lookup(make_key(0)).reason is Miss.EVICTED
    store.put(make_key(0), make_chunk())
    assert store.lookup(make_key(0)).reason is None


@pytest.mark.parametrize("index", [True, False])
def test_pinned_entries_stay(store, make_chunk, make_key, index):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    assert store.pin(make_key(0))
    assert store.pin(make_key(9)) is False
    if not index:
        without_index(store)
    for number in range(4, 9):
        store.put(make_key(number), make_chunk(number))
    assert set(store.keys()) == {make_key(number) for number in (0, 6, 7, 8)}
    assert store.unpin(make_key(0))
    assert store.unpin(make_key(0)) is False
    for number in range(9, 13):
        store.put(make_key(number), make_chunk(number))
    assert make_key(0) not in store


def test_pins_outlive_the_index(store, make_chunk, make_key):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    store.pin(make_key(0))
    store.index.close()
    for path in store.path.glob("index.sqlite*"):
        path.unlink()
    reopened = DiskStore(store.path, quota_bytes=store.quota_bytes)
    for number in range(4, 9):
        reopened.put(make_key(number), make_chunk(number))
    assert make_key(0) in reopened
    assert (reopened.stats().pinned, reopened.is_pinned(make_key(0))) == (1, True)
    assert reopened.delete(make_key(0))
    assert reopened.stats().pinned == 0


def test_a_pin_that_the_index_does_not_know_is_respected(store, make_chunk, make_key):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    (store.path / "pins").mkdir()
    (store.path / "pins" / make_key(0)).write_bytes(b"")
    store.put(make_key(4), make_chunk(4))
    assert set(store.keys()) == {make_key(number) for number in (0, 2, 3, 4)}


def test_what_can_never_fit_is_refused_and_evicts_nothing(store, make_chunk, make_key):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    with pytest.raises(
        StoreError, match=r"an entry of [\d,]+ bytes exceeds the quota of [\d,]+; raise quota="
    ):
        store.put(make_key(9), make_chunk(tokens=1000))
    assert store.stats().entries == 4
    for number in range(4):
        store.pin(make_key(number))
    with pytest.raises(StoreError, match=r"pinned entries fill the quota of .* bytes; unpin some, or raise"):
        store.put(make_key(4), make_chunk(4))
    assert store.stats().entries == 4
    store.put(make_key(0), make_chunk(7.0))  # in its own place
    assert store.get(make_key(0)).keys[0][0, 0, 0] == 7


def test_entries_that_the_index_does_not_know_count(tmp_path, size, make_chunk, make_key):
    path = tmp_path / "shared"
    other = DiskStore(path)
    without_index(other)
    for number in range(6):
        other.put(make_key(number), make_chunk(number))
    store = DiskStore(path, quota_bytes=4 * size + size // 2)
    assert store.index.num_bytes() == 0
    store.put(make_key(6), make_chunk(6))
    assert store.stats().entries == 4
    assert store.stats().num_bytes <= store.quota_bytes
    assert make_key(6) in store


def test_an_entry_is_not_evicted_under_its_reader(store, make_chunk, make_key, assert_same, monkeypatch):
    """An unlinked file stays readable for those who have it open; and it is opened only once."""
    store.put(make_key(0), make_chunk(3.0))
    decode_head, evicted = files.decode_head, []

    def evict_then_decode(*args):
        if not evicted:
            evicted.append(store.evict(store.index.chunk(make_key(0))))
        return decode_head(*args)

    monkeypatch.setattr(files, "decode_head", evict_then_decode)
    assert_same(store.get(make_key(0)), make_chunk(3.0))
    assert evicted[0] > 0
    assert make_key(0) not in store
    assert store.rejections == []
    assert store.lookup(make_key(0)).reason is Miss.EVICTED


def test_a_stopped_process_that_keeps_the_lock_is_named(store, make_chunk, make_key, monkeypatch):
    monkeypatch.setattr(eviction_module, "LOCK_S", 0.1)
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    with (
        FileLock(store.path / "store.lock"),
        pytest.raises(
            StoreError, match=r"another process has kept store.lock for 0.1 s; end it or try again"
        ),
    ):
        store.put(make_key(4), make_chunk(4))
    store.put(make_key(4), make_chunk(4))
    assert store.stats().entries == 4


def test_processes_that_write_read_and_evict_at_once(tmp_path):
    """Eight of them, 120 chunks, room for 40: what is read is what was written under its key, or nothing."""
    environment = os.environ | {"PYTHONPATH": str(Path(kvloom.__path__[0]).parent)}
    command = [sys.executable, str(EVICTOR), str(tmp_path / "chunks")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    reads, hits, wrong, rejected = map(int, done.stdout.split())
    assert (wrong, rejected) == (0, 0)
    assert reads == 8 * 50
    assert hits > 20
    store = DiskStore(tmp_path / "chunks", quota_bytes=10**9)
    one = store.size_of(next(store.keys()))
    assert store.stats().num_bytes <= 48 * one  # eight writers may each be one entry ahead
    assert store.verify() == []
    store.reconcile()
    assert store.index.num_bytes() == store.stats().num_bytes
