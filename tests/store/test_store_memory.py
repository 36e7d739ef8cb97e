from __future__ import annotations

import logging
import threading

import pytest

from kvloom.errors import MethodError
from kvloom.store import MemoryStore

CHUNK_BYTES = 3 * 8 + 2 * 2 * (2 * 3 * 4) * 4  # of make_chunk(): ids, and keys and values of two layers


def test_an_entry_comes_back_as_the_same_object(make_chunk, make_key):
    store, kv = MemoryStore(), make_chunk()
    store.put(make_key(0), kv)
    assert store.get(make_key(0)) is kv
    assert store.get(make_key(1)) is None
    assert make_key(0) in store
    assert make_key(1) not in store


def test_default_bound_is_4_gib():
    assert MemoryStore().limit_bytes == 4 * 1024**3
    with pytest.raises(MethodError, match="0 bytes holds nothing"):
        MemoryStore(0)


def test_the_least_recently_used_entry_goes_first(make_chunk, make_key):
    store = MemoryStore(3 * CHUNK_BYTES)
    for number in range(3):
        store.put(make_key(number), make_chunk())
    assert store.get(make_key(0)) is not None
    store.put(make_key(3), make_chunk())
    assert list(store.keys()) == [make_key(2), make_key(0), make_key(3)]
    store.put(make_key(4), make_chunk())
    assert list(store.keys()) == [make_key(0), make_key(3), make_key(4)]


def test_contains_is_no_use(make_chunk, make_key):
    store = MemoryStore(2 * CHUNK_BYTES)
    for number in range(2):
        store.put(make_key(number), make_chunk())
    assert store.contains(make_key(0))
    store.put(make_key(2), make_chunk())
    assert list(store.keys()) == [make_key(1), make_key(2)]


def test_bytes_are_counted_through_put_replace_delete_and_eviction(make_chunk, make_key):
    store = MemoryStore(3 * CHUNK_BYTES - 1)
    store.put(make_key(0), make_chunk())
    store.put(make_key(0), make_chunk(2.0))
    assert (store.stats().entries, store.stats().num_bytes) == (1, CHUNK_BYTES)
    store.put(make_key(1), make_chunk())
    store.put(make_key(2), make_chunk())
    stats = store.stats()
    assert (stats.entries, stats.num_bytes, stats.limit_bytes) == (2, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES - 1)
    assert store.delete(make_key(2)) is True
    assert store.delete(make_key(2)) is False
    assert (store.stats().entries, store.stats().num_bytes) == (1, CHUNK_BYTES)


def test_one_large_entry_evicts_as_many_as_it_needs(make_chunk, make_key):
    store = MemoryStore(3 * CHUNK_BYTES)
    for number in range(3):
        store.put(make_key(number), make_chunk())
    store.put(make_key(3), make_chunk(tokens=6))
    assert list(store.keys()) == [make_key(2), make_key(3)]
    assert store.stats().num_bytes == 3 * CHUNK_BYTES


def test_an_entry_beyond_the_bound_is_not_kept_and_costs_no_other(make_chunk, make_key, caplog):
    store = MemoryStore(CHUNK_BYTES)
    store.put(make_key(0), make_chunk())
    with caplog.at_level(logging.WARNING, logger="kvloom.store.memory"):
        store.put(make_key(1), make_chunk(tokens=6))
    assert list(store.keys()) == [make_key(0)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"of {2 * CHUNK_BYTES} bytes is not kept" in caplog.text
    store.put(make_key(0), make_chunk(tokens=6))  # replaces what was there by nothing, not by what was there
    assert store.get(make_key(0)) is None
    assert store.stats().num_bytes == 0


def test_reject_drops_the_entry(make_chunk, make_key):
    store = MemoryStore()
    store.put(make_key(0), make_chunk())
    store.reject(make_key(0), "is of another model")
    assert store.get(make_key(0)) is None
    assert store.stats().num_bytes == 0
    assert store.stats().rejected == 1


def test_threads_keep_the_books_right(make_chunk, make_key):
    store = MemoryStore(5 * CHUNK_BYTES)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(300):
                key = make_key((number * (seed + 1)) % 9)
                if number % 3 == 0:
                    store.put(key, make_chunk(tokens=3 + number % 2))
                elif number % 7 == 0:
                    store.delete(key)
                else:
                    store.get(key)
                list(store.keys())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    keys = list(store.keys())
    held = [store.get(key) for key in keys]
    assert 0 < len(keys) <= 5
    assert store.stats().num_bytes == sum(kv.num_bytes for kv in held if kv is not None) <= 5 * CHUNK_BYTES
