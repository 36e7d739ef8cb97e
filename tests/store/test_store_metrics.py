from __future__ import annotations

import os
import sys

import pytest
from faulty_store import FaultyStore
from prometheus_client import CollectorRegistry, generate_latest

from kvloom.store import DiskStore, MemoryStore
from kvloom.store.metrics import StoreMetrics, observe
from kvloom.store.tiers import TieredStore


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry):
    return lambda name, **labels: registry.get_sample_value(f"kvloom_store_{name}", labels)


def test_hits_misses_bytes_and_seconds_by_tier(tmp_path, registry, value, make_chunk, make_key):
    disk = DiskStore(tmp_path / "kv")
    observe(disk, registry)
    disk.put(make_key(0), make_chunk())
    size = disk.size_of(make_key(0))
    for _ in range(3):
        disk.get(make_key(0))
    disk.get(make_key(1))
    assert value("lookups_total", tier="disk", outcome="hit") == 3
    assert value("lookups_total", tier="disk", outcome="never stored") == 1
    assert value("read_bytes_total", tier="disk") == 3 * size
    assert value("written_bytes_total", tier="disk") == size
    assert value("read_seconds_count", tier="disk") == 3
    assert value("miss_seconds_count", tier="disk") == 1
    assert 0 < value("write_seconds_sum", tier="disk") < 10


def test_evictions_and_damage(tmp_path, registry, value, make_chunk, make_key):
    measured = DiskStore(tmp_path / "measured")
    measured.put(make_key(0), make_chunk())
    disk = DiskStore(tmp_path / "kv", quota_bytes=2 * measured.size_of(make_key(0)))
    metrics = observe(disk, registry)
    memory = MemoryStore(make_chunk().num_bytes)
    memory.use_metrics(metrics)
    for number in range(4):
        disk.put(make_key(number), make_chunk())
        memory.put(make_key(number), make_chunk())
    assert value("evictions_total", tier="disk", reason="quota") == 2
    assert value("evictions_total", tier="memory", reason="memory") == 3
    os.truncate(disk.path / make_key(3)[:2] / f"{make_key(3)}.safetensors", 50)
    disk.get(make_key(3))
    assert value("damaged_total", tier="disk") == 1
    assert value("lookups_total", tier="disk", outcome="damaged") == 1
    disk.documents.record("a", [make_key(2)])
    disk.documents.remove("a")
    assert value("evictions_total", tier="disk", reason="unused") == 1


def test_tiers_and_their_breakers(tmp_path, registry, value, make_chunk, make_key):
    faulty = FaultyStore()
    store = TieredStore([MemoryStore(), faulty])
    observe(store, registry)
    assert value("breaker_state", tier="FaultyStore") == 0
    store.put(make_key(0), make_chunk())
    store.get(make_key(0))
    assert value("lookups_total", tier="memory", outcome="hit") == 1
    faulty.fault = "down"
    for _ in range(4):
        store.get(make_key(1))
    assert value("breaker_state", tier="FaultyStore") == 2
    assert value("lookups_total", tier="FaultyStore", outcome="tier down") == 4
    assert value("lookups_total", tier="memory", outcome="never stored") == 4
    assert value("lookups_total", tier="tiers", outcome="tier down") == 4
    assert b'kvloom_store_breaker_state{tier="FaultyStore"} 2.0' in generate_latest(registry)


def test_without_the_package_nothing_is_counted_and_nothing_fails(monkeypatch, make_chunk, make_key):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    store = MemoryStore()
    assert type(observe(store)) is StoreMetrics
    store.put(make_key(0), make_chunk())
    assert store.get(make_key(0)) is not None
