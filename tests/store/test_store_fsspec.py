from __future__ import annotations

import sys

import fsspec
import pytest

from kvloom.errors import StoreError
from kvloom.store import DiskStore, open_store
from kvloom.store.format import encode
from kvloom.store.fsspec import FsspecStore
from kvloom.store.lookup import Miss


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    url = f"file://{tmp_path}/bucket/kv" if request.param == "file" else f"memory://bucket-{tmp_path.name}/kv"
    store = FsspecStore(url)
    yield store
    if request.param == "memory" and store._fs.exists(store._root):
        store._fs.rm(store._root, recursive=True)


def overwrite(store: FsspecStore, key: str, content: bytes) -> None:
    store._fs.pipe_file(store._file(key), content)


def test_entries_are_files_with_the_bytes_of_the_format(store, make_chunk, make_key, assert_same):
    key = make_key(0)
    assert list(store.keys()) == []
    assert store.lookup(key).reason is Miss.UNKNOWN
    store.put(key, make_chunk(1 / 3))
    assert_same(store.get(key), make_chunk(1 / 3))
    assert store._fs.cat_file(store._file(key)) == b"".join(encode(key, make_chunk(1 / 3)))
    assert [path.rpartition("/")[2] for path in store._fs.find(store._root)] == [f"{key}.safetensors"]
    found = store.lookup(key)
    assert (found.tier, found.num_bytes) == ("fsspec", len(b"".join(encode(key, make_chunk()))))


def test_the_four_methods(store, make_chunk, make_key, assert_same):
    keys = sorted(make_key(number) for number in range(4))
    for number, key in enumerate(keys):
        store.put(key, make_chunk(number))
    assert list(store.keys()) == keys
    assert (store.stats().entries, store.stats().where) == (4, store.where)
    assert keys[0] in store
    assert store.delete(keys[0]) is True
    assert store.delete(keys[0]) is False
    assert keys[0] not in store
    store.put(keys[1], make_chunk(9, tokens=5))
    assert_same(store.get(keys[1]), make_chunk(9, tokens=5))
    head = store.describe(keys[1])
    assert (head.num_tokens, head.fingerprint, head.start) == (5, "model-a", 7)
    assert store.describe(keys[0]) is None


@pytest.mark.parametrize("fault", ["a byte", "cut short", "another key", "empty"])
def test_a_damaged_entry_is_a_miss_with_a_reason(store, make_chunk, make_key, fault):
    key = make_key(0)
    content = bytearray(b"".join(encode(key, make_chunk())))
    if fault == "a byte":
        content[-3] ^= 1
    elif fault == "cut short":
        content = content[:300]
    elif fault == "another key":
        content = bytearray(b"".join(encode(make_key(1), make_chunk())))
    else:
        content = bytearray()
    store.put(key, make_chunk())
    overwrite(store, key, bytes(content))
    found = store.lookup(key)
    assert found.reason is Miss.DAMAGED
    assert found.detail == store.rejections[0].reason
    assert key not in store
    assert store.get(key) is None
    assert len(store.rejections) == 1


def test_a_later_version_stays(store, make_chunk, make_key):
    content = b"".join(encode(make_key(0), make_chunk())).replace(b'"version":"1"', b'"version":"9"')
    store.put(make_key(0), make_chunk())
    overwrite(store, make_key(0), content)
    assert store.lookup(make_key(0)).reason is Miss.UNREADABLE
    assert make_key(0) in store


def test_other_files_are_not_looked_at(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    for name in (
        "README",
        "ab/notes.safetensors",
        f"zz/{make_key(0)}.safetensors",
        f"{make_key(0)}.safetensors",
    ):
        path = f"{store._root}/{name}"
        store._fs.makedirs(store._fs._parent(path), exist_ok=True)
        store._fs.pipe_file(path, b"stray")
    assert list(store.keys()) == [make_key(0)]
    assert store.verify() == []


def test_a_file_system_that_fails_is_down_and_not_wrong(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())

    def refuse(*_, **__):
        raise PermissionError(13, "Forbidden")

    with monkeypatch.context() as patch:
        for name in ("cat_file", "pipe_file", "find", "isfile", "exists", "size"):
            patch.setattr(store._fs, name, refuse)
        found = store.lookup(make_key(0))
        assert (found.reason, found.kv) == (Miss.DOWN, None)
        assert (
            found.detail.endswith("does not answer: [Errno 13] Forbidden")
            or "forbidden" in found.detail.lower()
        )
        calls = [
            lambda: store.put(make_key(1), make_chunk()),
            lambda: store.delete(make_key(0)),
            lambda: list(store.keys()),
            lambda: make_key(0) in store,
        ]
        for call in calls:
            with pytest.raises(StoreError, match="does not answer"):
                call()
    assert store.get(make_key(0)) is not None
    assert store.rejections == []


def test_a_failed_write_leaves_nothing_half(tmp_path, make_chunk, make_key, monkeypatch, assert_same):
    store = FsspecStore(f"file://{tmp_path}/kv")
    store.put(make_key(0), make_chunk(1.0))

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._fs, "mv", refuse)
        with pytest.raises(StoreError, match="does not answer"):
            store.put(make_key(0), make_chunk(2.0))
    assert_same(store.get(make_key(0)), make_chunk(1.0))
    assert len([path for path in (tmp_path / "kv").rglob("*") if path.is_file()]) == 1


def test_the_files_are_those_of_a_disk_store(tmp_path, make_chunk, make_key, assert_same):
    FsspecStore(f"file://{tmp_path}/kv").put(make_key(0), make_chunk())
    assert_same(DiskStore(tmp_path / "kv").get(make_key(0)), make_chunk())
    DiskStore(tmp_path / "kv").put(make_key(1), make_chunk(2))
    store = open_store(f"fsspec:file://{tmp_path}/kv?deadline=5&fs.auto_mkdir=true")
    assert_same(store.get(make_key(1)), make_chunk(2))
    assert store.stats().tiers[0].deadline_s == 5


def test_what_cannot_be_opened_is_a_sentence():
    with pytest.raises(StoreError, match="cannot open nosuchfs://x/y: "):
        open_store("fsspec:nosuchfs://me:secret@x/y")
    missing = [name for name in ("s3", "gs", "abfs") if not _is_there(name)]
    if not missing:
        pytest.skip("every file system is installed")
    with pytest.raises(StoreError, match=f"cannot open {missing[0]}://b/p: .*install"):
        open_store(f"fsspec:{missing[0]}://b/p")


def _is_there(protocol: str) -> bool:
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(("package", "url"), [("redis", "redis://h/0"), ("fsspec", "fsspec:memory://a/b")])
def test_a_package_that_is_not_there_is_named(package, url, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StoreError, match=f"needs the package {package}; pip install 'kvloom.{package}.'"):
        open_store(url)
