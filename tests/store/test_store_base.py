from __future__ import annotations

import importlib
import logging
import pkgutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloom.store
from kvloom.errors import MethodError, StoreError
from kvloom.store import DiskStore, MemoryStore, Rejection, Store, chunk_key, open_store, parse_size, stores

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


class DictStore(Store):
    """The four methods and nothing else."""

    def __init__(self):
        super().__init__()
        self.entries = {}

    def get(self, key):
        return self.entries.get(key)

    def put(self, key, kv):
        self.entries[key] = kv

    def delete(self, key):
        return self.entries.pop(key, None) is not None

    def keys(self):
        return iter(list(self.entries))


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_chunk_key_is_the_one_in_the_documentation():
    key = chunk_key("model-a", ids(1, 2), ids(3, -4))
    assert key == "27828c881b64b652dc5e58cf7298071f883734e7508ee3d0e7078ac5a35933f9"
    assert key in (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


def test_chunk_key_depends_on_each_part_and_on_the_cuts_between_them():
    keys = {
        chunk_key("m", ids(1), ids(2)),
        chunk_key("n", ids(1), ids(2)),
        chunk_key("m", ids(1, 2), ids()),
        chunk_key("m", ids(), ids(1, 2)),
        chunk_key("m", ids(2), ids(1)),
        chunk_key("m", ids(1), ids(3)),
    }
    assert len(keys) == 6


@settings(max_examples=50, deadline=None)
@given(IDS, IDS, IDS, IDS)
def test_chunk_keys_are_equal_only_for_equal_parts(header, chunk, other_header, other_chunk):
    same = (header, chunk) == (other_header, other_chunk)
    key, other = (
        chunk_key("m", ids(*header), ids(*chunk)),
        chunk_key("m", ids(*other_header), ids(*other_chunk)),
    )
    assert (key == other) is same


def test_chunk_key_ignores_integer_width_and_memory_layout():
    key = chunk_key("m", ids(1, 2), ids(3, 4))
    assert chunk_key("m", ids(1, 2).int(), ids(3, 0, 4, 0)[::2]) == key


@pytest.mark.parametrize(
    "wrong", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(1), torch.tensor([True])]
)
def test_chunk_key_refuses_what_is_not_a_list_of_ids(wrong):
    with pytest.raises(ValueError, match=r"chunk_ids must be \(T,\) integers"):
        chunk_key("m", ids(1), wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("500MB", 500_000_000),
        ("1", 1),
        ("4096", 4096),
        ("7b", 7),
        ("1.5 KiB", 1536),
        ("2kb", 2000),
        ("3MiB", 3 * 2**20),
        ("1TiB", 2**40),
        (" 0.5TB ", 5 * 10**11),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["abc", "", "-1", "-4GiB", "4 bananas", "GiB", "1e3", "nan", "4G", "1.", "4GiB!", "\u0661"]
)
def test_parse_size_refuses_what_is_no_size(text):
    with pytest.raises(MethodError, match="is not a number with a unit; write for example 4GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.4"])
def test_parse_size_refuses_less_than_a_byte(text):
    with pytest.raises(MethodError, match="is less than one byte"):
        parse_size(text)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 2**60),
    st.sampled_from([("", 1), ("kB", 1000), ("MiB", 2**20), ("gib", 2**30), ("TB", 10**12)]),
)
def test_parse_size_is_exact(count, unit):
    assert parse_size(f"{count}{unit[0]}") == count * unit[1]


def test_open_store_memory():
    store = open_store("memory:")
    assert isinstance(store, MemoryStore)
    assert store.limit_bytes == 4 * 2**30
    sized = open_store("memory:500MB")
    assert isinstance(sized, MemoryStore)
    assert sized.limit_bytes == 500_000_000


def test_open_store_disk_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store("disk:~/deep/chunks")
    assert isinstance(store, DiskStore)
    assert store.path == tmp_path / "deep" / "chunks"
    assert store.path.is_dir()


def test_a_disk_store_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("disk:chunks").stats().where == str(tmp_path / "chunks")


def test_open_store_returns_a_store_as_it_is():
    store = DictStore()
    assert open_store(store) is store


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/tmp/chunks", "store '/tmp/chunks' has no scheme; for a folder write 'disk:/tmp/chunks'"),
        ("./a:b", r"for a folder write 'disk:\./a:b'"),
        ("chunks", "for a folder write 'disk:chunks'"),
        ("memory", "store 'memory' lacks its colon; write 'memory:'"),
        ("", "write 'memory:' or 'disk:PATH'"),
        ("disc:/tmp/chunks", "unknown store 'disc'; did you mean 'disk'?"),
        ("Memory:", "unknown store 'Memory'; did you mean 'memory'?"),
        ("xyzzy:1", "unknown store 'xyzzy'; there are: disk, fsspec, memory, redis, tiers"),
        ("disk:", "store 'disk:' names no folder; write 'disk:PATH'"),
        ("memory:lots", "size 'lots' is not a number with a unit"),
        ("memory:0", "size '0' is less than one byte"),
        (Path("/tmp/chunks"), "neither text nor a Store; write 'disk:/tmp/chunks'"),
    ],
)
def test_open_store_says_what_to_write_instead(url, message):
    with pytest.raises(MethodError, match=message.replace("?", r"\?")):
        open_store(url)


def test_one_registration_per_file():
    modules = [module.name for module in pkgutil.iter_modules(kvloom.store.__path__)]
    registered: dict[str, list[str]] = {}
    for name in modules:
        module = importlib.import_module(f"kvloom.store.{name}")
        classes = [
            value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Store)
        ]
        own = [value for value in classes if value is not Store and value.__module__ == module.__name__]
        if own:
            registered[name] = [scheme for scheme in stores if stores[scheme] in own]
            assert len(own) == 1
    assert registered["disk"] == ["disk"]
    assert registered["memory"] == ["memory"]
    assert all(len(schemes) == 1 for schemes in registered.values())


@pytest.mark.parametrize("url", ["memory:", "disk"])
@pytest.mark.parametrize(
    "key", ["", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", "../" + "a" * 61, "a" * 65, None]
)
def test_every_method_refuses_what_is_no_key(url, key, make_chunk, tmp_path):
    store = open_store(f"disk:{tmp_path / 'chunks'}" if url == "disk" else url)
    calls = [
        lambda: store.get(key),
        lambda: store.put(key, make_chunk()),
        lambda: store.delete(key),
        lambda: store.contains(key),
        lambda: key in store,
        lambda: store.reject(key, "is wrong"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is not 64 lower-case hexadecimal characters"):
            call()


def test_four_methods_are_enough(make_chunk, make_key):
    store = DictStore()
    store.put(make_key(0), make_chunk())
    assert make_key(0) in store
    assert make_key(1) not in store
    stats = store.stats()
    assert (stats.where, stats.entries, stats.num_bytes, stats.limit_bytes) == ("DictStore", 1, None, None)
    assert store.verify() == []


def test_reject_counts_remembers_and_logs_once(make_chunk, make_key, caplog):
    store = DictStore()
    store.put(make_key(0), make_chunk())
    with caplog.at_level(logging.WARNING):
        store.reject(make_key(0), "is of another model")
        store.reject(make_key(1), "is absent, which is no fault")
    assert store.rejections == [Rejection(make_key(0), "is of another model")]
    assert store.stats().rejected == 1
    assert store.stats().entries == 0
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("kvloom.store.base", f"DictStore: entry {make_key(0)} is of another model; it is set aside")
    ]


def test_an_entry_that_cannot_be_moved_is_left_and_remembered(make_chunk, make_key, monkeypatch):
    def refuse(key):
        raise StoreError("read-only")

    store = DictStore()
    store.put(make_key(0), make_chunk())
    monkeypatch.setattr(store, "delete", refuse)
    store.reject(make_key(0), "is of another model")
    assert store.rejections == [Rejection(make_key(0), "is of another model", set_aside=False)]
