"""Every request says where the entry was, or why it was not."""

from __future__ import annotations

import json
import os

import pytest
from faulty_store import FaultyStore

from kvloom.store import DiskStore, MemoryStore
from kvloom.store.lookup import Lookup, Miss, most_telling


@pytest.fixture
def disk(tmp_path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


def test_a_hit_names_tier_bytes_and_seconds(disk, make_chunk, make_key, assert_same):
    disk.put(make_key(0), make_chunk())
    found = disk.lookup(make_key(0))
    assert_same(found.kv, make_chunk())
    assert (found.key, found.tier, found.reason, found.tried) == (make_key(0), "disk", None, ())
    assert found.num_bytes == disk.size_of(make_key(0))
    assert 0 < found.seconds < 5
    assert str(found) == f"hit (disk, {found.num_bytes:,} bytes in {found.seconds * 1000:.1f} ms)"
    data = json.loads(json.dumps(found.as_dict()))
    assert (data["hit"], data["tier"], data["reason"], data["num_bytes"]) == (
        True,
        "disk",
        None,
        found.num_bytes,
    )


def test_each_reason_of_a_disk_store(disk, make_chunk, make_key):
    keys = [make_key(number) for number in range(6)]
    for key in keys[1:]:
        disk.put(key, make_chunk())
    files = [disk.path / key[:2] / f"{key}.safetensors" for key in keys]
    disk.evict(disk.index.chunk(keys[1]))
    disk.delete(keys[2])
    os.truncate(files[3], 100)
    files[4].unlink()
    files[5].write_bytes(files[5].read_bytes().replace(b'"version":"1"', b'"version":"3"'))
    reasons = [Miss.NEVER_STORED, Miss.EVICTED, Miss.DELETED, Miss.DAMAGED, Miss.VANISHED, Miss.UNREADABLE]
    assert [disk.lookup(key).reason for key in keys] == reasons
    assert [DiskStore(disk.path).lookup(key).reason for key in keys] == reasons  # and after a restart
    assert "does not fit" in DiskStore(disk.path).lookup(keys[3]).detail
    assert str(disk.lookup(keys[1])) == "miss (evicted: to stay within the quota)"
    for key in keys:
        disk.put(key, make_chunk())
    assert [disk.lookup(key).reason for key in keys] == [None] * 6
    files[1].unlink()
    assert disk.lookup(keys[1]).reason is Miss.VANISHED  # what became of it earlier is no longer the reason


def test_a_damaged_entry_is_remembered_without_the_index(disk, make_chunk, make_key):
    disk.put(make_key(0), make_chunk())
    disk.reject(make_key(0), "is of another model")
    disk.index.close()
    for path in disk.path.glob("index.sqlite*"):
        path.unlink()
    reopened = DiskStore(disk.path)
    assert reopened.lookup(make_key(0)).reason is Miss.DAMAGED
    assert reopened.lookup(make_key(0)).detail == "is of another model"


def test_never_is_only_said_of_a_store_whose_index_saw_its_beginning(disk, make_chunk, make_key):
    assert disk.lookup(make_key(1)).reason is Miss.NEVER_STORED
    disk.put(make_key(0), make_chunk())
    disk.index.close()
    for path in disk.path.glob("index.sqlite*"):
        path.unlink()
    assert DiskStore(disk.path).lookup(make_key(1)).reason is Miss.UNKNOWN


def test_the_reasons_of_a_memory_store(make_chunk, make_key):
    store = MemoryStore(2 * make_chunk().num_bytes)
    for number in range(3):
        store.put(make_key(number), make_chunk(number))
    store.delete(make_key(1))
    store.reject(make_key(2), "is of another model")
    expected = [Miss.EVICTED, Miss.DELETED, Miss.DAMAGED, Miss.NEVER_STORED]
    assert [store.lookup(make_key(number)).reason for number in range(4)] == expected
    store.put(make_key(0), make_chunk())
    assert store.lookup(make_key(0)).tier == "memory"


def test_four_methods_are_enough_for_a_lookup(make_chunk, make_key):
    store = FaultyStore()
    assert store.lookup(make_key(0)).reason is Miss.UNKNOWN
    store.put(make_key(0), make_chunk())
    found = store.lookup(make_key(0))
    assert (found.tier, found.num_bytes) == ("FaultyStore", make_chunk().num_bytes)


def test_one_reason_stands_for_those_of_several_tiers():
    def miss(reason: Miss) -> Lookup:
        return Lookup(key="", tier="", reason=reason)

    for more, less in [
        (Miss.DOWN, Miss.NEVER_STORED),
        (Miss.EVICTED, Miss.NEVER_STORED),
        (Miss.UNKNOWN, Miss.NEVER_STORED),
        (Miss.DAMAGED, Miss.DOWN),
    ]:
        assert most_telling((miss(less), miss(more))).reason is more
        assert most_telling((miss(more), miss(less))).reason is more
