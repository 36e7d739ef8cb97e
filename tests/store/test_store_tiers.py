"""Tiers: what one has, all have; what one does not answer costs no more than computing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faulty_store import FaultyStore

import kvloom
from kvloom.errors import MethodError, StoreError
from kvloom.store import DiskStore, MemoryStore
from kvloom.store.lookup import Miss
from kvloom.store.tier import CALLS
from kvloom.store.tiers import TieredStore

PREFILL = 1000.0  # tokens a second; a chunk of 100 tokens is worth 0.1 s


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def faulty():
    store = FaultyStore()
    yield store
    store.released.set()


@pytest.fixture
def disk(tmp_path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


def test_writes_go_to_all_and_reads_come_from_the_first(disk, make_chunk, make_key, assert_same):
    memory = MemoryStore()
    store = TieredStore([memory, disk])
    store.put(make_key(0), make_chunk())
    for part in (memory, disk, store):
        assert_same(part.get(make_key(0)), make_chunk())
    found = store.lookup(make_key(0))
    assert (found.tier, found.tried, found.reason, found.num_bytes) == (
        "memory",
        (),
        None,
        make_chunk().num_bytes,
    )
    assert make_key(0) in store
    assert store.describe(make_key(0)).num_tokens == 3


def test_what_a_lower_tier_has_is_copied_upwards(tmp_path, disk, make_chunk, make_key, assert_same):
    memory, far = MemoryStore(), DiskStore(tmp_path / "far")
    far.put(make_key(0), make_chunk())
    store = TieredStore([memory, disk, far])
    found = store.lookup(make_key(0))
    assert_same(found.kv, make_chunk())
    assert found.tier == "disk"
    assert [(miss.tier, miss.reason) for miss in found.tried] == [
        ("memory", Miss.NEVER_STORED),
        ("disk", Miss.NEVER_STORED),
    ]
    assert found.num_bytes == far.size_of(make_key(0))
    assert store.flush()
    assert_same(memory.get(make_key(0)), make_chunk())
    assert_same(disk.get(make_key(0)), make_chunk())
    assert store.lookup(make_key(0)).tier == "memory"


def test_delete_keys_and_stats_are_of_all(disk, make_chunk, make_key):
    memory = MemoryStore()
    store = TieredStore([memory, disk])
    store.put(make_key(0), make_chunk())
    memory.put(make_key(1), make_chunk())
    disk.put(make_key(2), make_chunk())
    assert list(store.keys()) == sorted(make_key(number) for number in range(3))
    stats = store.stats()
    assert (stats.entries, [tier.entries for tier in stats.tiers]) == (3, [2, 2])
    assert stats.num_bytes == 2 * make_chunk().num_bytes + disk.stats().num_bytes
    assert [tier.breaker for tier in stats.tiers] == ["closed", "closed"]
    assert store.delete(make_key(0)) is True
    assert store.delete(make_key(0)) is False
    assert [make_key(0) in part for part in (memory, disk, store)] == [False, False, False]
    assert store.lookup(make_key(0)).reason is Miss.DELETED


def test_a_damaged_entry_of_one_tier_is_served_from_the_next(
    tmp_path, disk, make_chunk, make_key, assert_same
):
    far = DiskStore(tmp_path / "far")
    store = TieredStore([disk, far])
    store.put(make_key(0), make_chunk())
    os.truncate(disk.path / make_key(0)[:2] / f"{make_key(0)}.safetensors", 200)
    found = store.lookup(make_key(0))
    assert_same(found.kv, make_chunk())
    assert [(miss.reason, miss.detail[:10]) for miss in found.tried] == [(Miss.DAMAGED, "is damaged")]
    assert [rejection.key for rejection in store.rejections] == [make_key(0)]
    assert store.stats().rejected == 1
    store.flush()
    assert_same(disk.get(make_key(0)), make_chunk())  # healed from below
    store.reject(make_key(0), "is of another model")
    assert [make_key(0) in part for part in (disk, far)] == [False, False]
    assert store.lookup(make_key(0)).reason is Miss.DAMAGED


def test_verify_reads_every_tier(tmp_path, disk, make_chunk, make_key):
    far = DiskStore(tmp_path / "far")
    store = TieredStore([MemoryStore(), disk, far])
    for number in range(3):
        store.put(make_key(number), make_chunk(number))
    os.truncate(far.path / make_key(1)[:2] / f"{make_key(1)}.safetensors", 200)
    assert [rejection.key for rejection in store.verify()] == [make_key(1)]
    assert (disk.stats().entries, far.stats().entries) == (3, 2)


@pytest.mark.parametrize("fault", ["down", "wrong"])
def test_a_tier_that_fails_costs_nothing_and_is_left_alone(
    faulty, disk, make_chunk, make_key, assert_same, fault
):
    clock = Clock()
    store = TieredStore([faulty, disk], clock=clock)
    store.put(make_key(0), make_chunk())
    faulty.fault = fault
    for _ in range(5):
        assert_same(store.get(make_key(0)), make_chunk())
        assert store.lookup(make_key(1)).reason is Miss.DOWN
    assert faulty.calls == 1 + 3
    tier = store.stats().tiers[0]
    assert (tier.breaker, tier.failures, tier.retry_in_s, tier.entries) == ("open", 3, 1.0, None)
    assert "not asked for another 1 s" in tier.detail
    clock.now = 1.1
    assert store.lookup(make_key(1)).reason is Miss.DOWN
    assert faulty.calls == 5
    assert store.stats().tiers[0].retry_in_s == 2.0
    faulty.fault = ""
    clock.now = 3.2
    assert store.lookup(make_key(0)).tier == "FaultyStore"
    assert (store.stats().tiers[0].breaker, store.stats().tiers[0].entries) == ("closed", 1)


def test_a_tier_that_hangs_costs_its_price_a_few_times_and_then_nothing(faulty, disk, make_chunk, make_key):
    store = TieredStore([faulty, disk])
    store.set_prefill_speed(PREFILL)
    for number in range(30):
        store.put(make_key(number), make_chunk(number, tokens=100))
    faulty.fault = "hangs"
    start = time.perf_counter()
    waits = []
    for number in range(30):
        before = time.perf_counter()
        found = store.lookup(make_key(number), num_tokens=100)
        waits.append(time.perf_counter() - before)
        assert found.kv is None or found.kv.keys[0][0, 0, 0] == number
        assert found.tried or found.reason
    assert max(waits) < 0.1 + 0.15
    assert time.perf_counter() - start < CALLS * 0.1 + 1.5  # not 30 times
    assert faulty.calls <= 30 + CALLS
    assert store.lookup(make_key(0), num_tokens=100).tier == "disk"


def test_a_slow_tier_is_passed_over_once_it_is_known_to_be(faulty, make_chunk, make_key):
    store = TieredStore([faulty])
    kv = make_chunk(tokens=100)
    store.put(make_key(0), kv)
    faulty.fault, faulty.seconds = "slow", 0.3
    assert store.lookup(make_key(0)).kv is not None  # without a price it is waited for
    store.set_prefill_speed(PREFILL)
    start = time.perf_counter()
    found = store.lookup(make_key(0), num_tokens=100)
    assert time.perf_counter() - start < 0.05
    assert found.reason is Miss.DEADLINE
    assert found.detail.startswith("it would take 0.3")
    assert found.detail.endswith(" s, and may take 0.1 s")
    store.set_prefill_speed(PREFILL / 10)  # a chunk is worth 1 s
    assert store.lookup(make_key(0), num_tokens=100).kv is not None


def test_a_tier_that_was_slow_is_asked_again(faulty, make_chunk, make_key):
    store = TieredStore([faulty])
    store.put(make_key(0), make_chunk(tokens=100))
    faulty.fault, faulty.seconds = "slow", 0.2
    assert store.lookup(make_key(0)).kv is not None
    store.set_prefill_speed(PREFILL)
    faulty.fault = ""
    misses = 0
    while store.lookup(make_key(0), num_tokens=100).kv is None:
        misses += 1
        assert misses < 20
    assert misses >= 2


def test_a_deadline_given_is_kept_whatever_the_price(faulty, make_chunk, make_key):
    faulty.deadline_s = 0.05
    store = TieredStore([faulty])
    store.set_prefill_speed(1.0)
    faulty.fault = "hangs"
    start = time.perf_counter()
    found = store.lookup(make_key(0), num_tokens=100)
    assert 0.04 < time.perf_counter() - start < 0.3
    assert (found.reason, found.detail) == (Miss.DEADLINE, "no answer within 0.05 s")


def test_all_tiers_together_have_one_patience(make_chunk, make_key):
    slow = [FaultyStore() for _ in range(3)]
    store = TieredStore(slow)
    store.set_prefill_speed(PREFILL)
    for part in slow:
        part.fault = "hangs"
    start = time.perf_counter()
    found = store.lookup(make_key(0), num_tokens=100)
    assert time.perf_counter() - start < 0.25
    assert [miss.detail for miss in found.tried][1:] == ["the tiers above took all the time there was"] * 2
    for part in slow:
        part.released.set()


def test_writes_that_a_tier_refuses(faulty, disk, make_chunk, make_key, caplog):
    store = TieredStore([MemoryStore(), faulty, disk])
    faulty.fault = "full"
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            store.put(make_key(number), make_chunk(number))
    assert "an entry was not written to FaultyStore: faulty is full" in caplog.text
    assert store.stats().tiers[1].breaker == "closed"  # it answers
    assert disk.stats().entries == 5
    alone = TieredStore([MemoryStore(), faulty])
    with pytest.raises(StoreError, match="faulty is full"):
        alone.put(make_key(0), make_chunk())
    assert alone.get(make_key(0)) is not None


def test_a_write_goes_on_after_its_deadline(faulty, make_chunk, make_key):
    store = TieredStore([faulty])
    store.set_prefill_speed(100.0)  # three tokens: 0.03 s
    faulty.fault, faulty.seconds = "slow", 0.3
    start = time.perf_counter()
    store.put(make_key(0), make_chunk())
    assert time.perf_counter() - start < 0.2
    assert make_key(0) not in faulty.entries
    assert store.flush(0.01) is False
    assert store.flush(5) is True
    assert make_key(0) in faulty.entries


def test_what_cannot_be_deleted_everywhere_says_where(faulty, disk, make_chunk, make_key):
    store = TieredStore([faulty, disk])
    store.put(make_key(0), make_chunk())
    faulty.fault = "down"
    with pytest.raises(StoreError, match="not done everywhere: FaultyStore: faulty does not answer"):
        store.delete(make_key(0))
    assert make_key(0) not in disk


def test_no_tier_and_no_speed_are_refused():
    with pytest.raises(MethodError, match="needs at least one"):
        TieredStore([])
    for speed in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="a prefill speed is more than 0 tokens a second"):
            TieredStore([MemoryStore()]).set_prefill_speed(speed)


def test_pins_are_those_of_the_disk_tier(disk, make_chunk, make_key):
    store = TieredStore([MemoryStore(), disk])
    store.put(make_key(0), make_chunk())
    assert store.pin(make_key(0))
    assert (disk.is_pinned(make_key(0)), store.is_pinned(make_key(0)), store.stats().pinned) == (
        True,
        True,
        1,
    )
    assert store.unpin(make_key(0))
    assert store.rebuild() == 1
    with pytest.raises(StoreError, match="has no disk tier"):
        TieredStore([MemoryStore()]).pin(make_key(0))
    with pytest.raises(StoreError, match="memory pins nothing; use a disk store"):
        MemoryStore().pin(make_key(0))


def test_a_read_that_hangs_does_not_keep_the_process(tmp_path):
    """A write is waited for at exit, a read is not."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torch\n"
        "from kvloom.kv import ChunkKV\n"
        "from faulty_store import FaultyStore\n"
        "from kvloom.store.tiers import TieredStore\n"
        "class Store(FaultyStore):\n"
        "    def put(self, key, kv):\n"
        "        super().put(key, kv)\n"
        "        open(sys.argv[2], 'w').close()\n"
        "store = Store(seconds=0.5)\n"
        "store.fault = sys.argv[1]\n"
        "store.deadline_s = 0.05\n"
        "tiers = TieredStore([store])\n"
        "kv = ChunkKV(torch.arange(1), (torch.ones(1, 1, 1),), (torch.ones(1, 1, 1),), 'm')\n"
        "tiers.get('ab' * 32) if store.fault == 'hangs' else tiers.put('ab' * 32, kv)\n"
        "print(time.time())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(kvloom.__path__[0]).parent)])
    written = tmp_path / "written"
    for fault in ("hangs", "slow"):
        command = [sys.executable, str(script), fault, str(written)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": path},
            check=True,
        )
        assert time.time() - float(done.stdout) < 4
        assert written.exists() is (fault == "slow")
