from __future__ import annotations

import builtins
import errno
import json
import logging
import os
import random
import runpy
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kvloom
from kvloom.errors import StoreError
from kvloom.kv import ChunkKV
from kvloom.store import DiskStore, Rejection, open_store

WRITER = Path(__file__).with_name("writer_process.py")


@pytest.fixture
def store(tmp_path) -> DiskStore:
    return DiskStore(tmp_path / "chunks")


def file_of(store: DiskStore, key: str) -> Path:
    return store.path / key[:2] / f"{key}.safetensors"


def files_in(store: DiskStore) -> set[str]:
    """All but the index, which is only a cache of what they say."""
    paths = (path for path in store.path.rglob("*") if path.is_file())
    return {str(path.relative_to(store.path)) for path in paths if not path.name.startswith("index.sqlite")}


def test_an_entry_is_one_private_file_at_the_place_its_key_names(store, make_chunk, make_key, assert_same):
    key, kv = make_key(0), make_chunk()
    assert store.get(key) is None
    store.put(key, kv)
    assert files_in(store) == {f"{key[:2]}/{key}.safetensors"}
    assert stat.S_IMODE(file_of(store, key).stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o700
    assert_same(store.get(key), kv)
    assert_same(DiskStore(store.path).get(key), kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_come_back_bit_for_bit(store, make_chunk, make_key, assert_same, dtype):
    kv = make_chunk(1 / 3, dtype=dtype)
    store.put(make_key(0), kv)
    assert_same(store.get(make_key(0)), kv)


def test_put_replaces(store, make_chunk, make_key, assert_same):
    store.put(make_key(0), make_chunk(1.0))
    store.put(make_key(0), make_chunk(2.0, tokens=5))
    assert_same(store.get(make_key(0)), make_chunk(2.0, tokens=5))
    assert store.stats().entries == 1


def test_keys_stats_contains_delete(store, make_chunk, make_key):
    keys = sorted(make_key(number) for number in range(5))
    for key in keys:
        store.put(key, make_chunk())
    assert list(store.keys()) == keys
    stats = store.stats()
    assert stats.entries == 5
    assert stats.num_bytes == sum(file_of(store, key).stat().st_size for key in keys)
    assert (stats.where, stats.limit_bytes, stats.rejected) == (str(store.path), None, 0)
    assert keys[0] in store
    assert store.delete(keys[0]) is True
    assert store.delete(keys[0]) is False
    assert keys[0] not in store
    assert list(store.keys()) == keys[1:]


def test_keys_stats_and_contains_read_no_contents(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())
    file_of(store, make_key(0)).write_bytes(b"damaged")

    def refuse(*_, **__):
        raise AssertionError("opened a file")

    monkeypatch.setattr(builtins, "open", refuse)
    assert list(store.keys()) == [make_key(0)]
    assert (store.stats().entries, store.stats().num_bytes) == (1, 7)
    assert make_key(0) in store
    assert store.rejections == []


def test_other_files_are_not_looked_at(store, make_chunk, make_key):
    key = make_key(0)
    store.put(key, make_chunk())
    shard = file_of(store, key).parent
    strays = [
        shard / f"{key}.pt",
        shard / f"{key}",
        shard / f"{key}.safetensors.bak",
        shard / "notes.safetensors",
        shard / f"{'0' if key[0] != '0' else '1'}{key[1:]}.safetensors",
        store.path / f"{key}.safetensors",
        store.path / "README",
        store.path / "zz" / f"{key}.safetensors",
    ]
    (store.path / "zz").mkdir()
    for stray in strays:
        stray.write_bytes(b"stray")
    (shard / f"{key[:2]}{'e' * 62}.safetensors").mkdir()
    assert list(store.keys()) == [key]
    assert store.stats().entries == 1
    assert DiskStore(store.path, sweep_after_s=0).verify() == []
    assert all(stray.exists() for stray in strays)


def regions(content: bytes) -> dict[str, int]:
    """One offset in each part of a chunk file."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    offsets = {
        "length": 1,
        "first of header": 8,
        "fingerprint": content.index(b"model-a"),
        "checksum": content.index(b"xxh3_128:") + 12,
        "key": content.index(b'"key":"') + 10,
        "start": content.index(b'"start":"') + 9,
        "shape": content.index(b'"shape":[2') + 9,
        "last of file": len(content) - 1,
    }
    for name, entry in header.items():
        if name != "__metadata__":
            offsets[name] = 8 + length + entry["data_offsets"][0]
    return offsets


REGIONS = ["length", "first of header", "fingerprint", "checksum", "key", "start", "shape", "last of file"]


@pytest.mark.parametrize("region", [*REGIONS, "token_ids", "keys.0", "keys.1", "values.0", "values.1"])
def test_a_changed_byte_costs_that_entry_alone(store, make_chunk, make_key, assert_same, caplog, region):
    for number in range(2):
        store.put(make_key(number), make_chunk(number))
    path = file_of(store, make_key(0))
    content = bytearray(path.read_bytes())
    content[regions(bytes(content))[region]] ^= 4
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert store.get(make_key(0)) is None
        assert store.get(make_key(0)) is None
    assert_same(store.get(make_key(1)), make_chunk(1))
    (rejection,) = store.rejections
    assert rejection.key == make_key(0)
    assert rejection.set_aside
    assert store.stats().rejected == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert rejection.reason in caplog.text
    quarantine = store.path / "quarantine"
    assert (quarantine / path.name).read_bytes() == content
    assert (quarantine / f"{make_key(0)}.txt").read_text() == f"{path.name} {rejection.reason}\n"
    assert list(store.keys()) == [make_key(1)]
    store.put(make_key(0), make_chunk(3.0))
    assert_same(store.get(make_key(0)), make_chunk(3.0))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_a_miss(store, make_chunk, make_key, assert_same, share):
    for number in range(2):
        store.put(make_key(number), make_chunk(number))
    path = file_of(store, make_key(0))
    os.truncate(path, int(share * path.stat().st_size))
    assert store.get(make_key(0)) is None
    assert "is damaged" in store.rejections[0].reason
    assert_same(store.get(make_key(1)), make_chunk(1))


def test_a_file_cut_short_while_it_is_read_is_a_miss(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())
    path = file_of(store, make_key(0))
    fstat = os.fstat
    rejected = []

    def fstat_then_truncate(descriptor):
        result = fstat(descriptor)
        os.truncate(path, 500)
        return result

    with monkeypatch.context() as patch:
        patch.setattr("kvloom.store.disk.os.fstat", fstat_then_truncate)
        patch.setattr(store, "reject", lambda key, reason: rejected.append((key, reason)))
        assert store.get(make_key(0)) is None
    assert rejected == [(make_key(0), "is damaged: its header of 568 bytes does not fit in 492")]


def test_what_was_read_outlives_its_file(store, make_chunk, make_key, assert_same):
    store.put(make_key(0), make_chunk())
    kv = store.get(make_key(0))
    os.truncate(file_of(store, make_key(0)), 0)
    assert_same(kv, make_chunk())


def test_the_file_of_another_key_is_a_miss(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    foreign = file_of(store, make_key(1))
    foreign.parent.mkdir(exist_ok=True)
    file_of(store, make_key(0)).rename(foreign)
    assert store.get(make_key(1)) is None
    assert store.rejections == [Rejection(make_key(1), f"holds the chunk of another key, {make_key(0)}")]
    assert store.get(make_key(0)) is None
    assert len(store.rejections) == 1


def test_a_later_version_is_a_miss_that_stays(store, make_chunk, make_key, caplog, assert_same):
    store.put(make_key(0), make_chunk())
    path = file_of(store, make_key(0))
    content = path.read_bytes().replace(b'"version":"1"', b'"version":"3"')
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert store.get(make_key(0)) is None
    assert path.read_bytes() == content
    (rejection,) = store.rejections
    assert rejection.set_aside is False
    assert "has format version 3" in rejection.reason
    assert len(caplog.records) == 1
    assert store.verify() == [rejection]
    store.put(make_key(0), make_chunk())
    assert_same(store.get(make_key(0)), make_chunk())
    assert store.verify() == []


def test_verify_reads_every_entry_and_reports_progress(store, make_chunk, make_key):
    for number in range(4):
        store.put(make_key(number), make_chunk(number))
    for number in (1, 3):
        os.truncate(file_of(store, make_key(number)), 100)
    progress = []
    rejected = store.verify(lambda done, total: progress.append((done, total)))
    assert {rejection.key for rejection in rejected} == {make_key(1), make_key(3)}
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert set(store.keys()) == {make_key(0), make_key(2)}
    assert store.verify() == []
    assert store.stats().rejected == 2


def test_damage_in_a_folder_that_cannot_be_written_is_a_miss_in_place(
    store, make_chunk, make_key, monkeypatch, caplog
):
    store.put(make_key(0), make_chunk())
    os.truncate(file_of(store, make_key(0)), 100)

    def refuse(*_):
        raise OSError(errno.EROFS, "")

    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(2):
        assert store.get(make_key(0)) is None
    assert [rejection.set_aside for rejection in store.rejections] == [False]
    assert len(caplog.records) == 1


def test_an_entry_that_cannot_be_read_is_a_miss_in_place(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        assert store.get(make_key(0)) is None
    assert store.rejections == [
        Rejection(make_key(0), "cannot be read: too many open files", set_aside=False)
    ]
    assert store.get(make_key(0)) is not None


FAILURES = [
    (errno.ENOSPC, "no space left on device: free space or choose another store with --store"),
    (errno.EDQUOT, "disk quota exceeded: free space or choose another store with --store"),
    (errno.EACCES, "permission denied: make it writable or choose another store with --store"),
    (errno.EROFS, "read-only file system: make it writable or choose another store with --store"),
]


@pytest.mark.parametrize(("code", "text"), FAILURES)
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failed_write_says_why_and_changes_nothing(
    store, make_chunk, make_key, assert_same, monkeypatch, code, text, call
):
    store.put(make_key(0), make_chunk(1.0))
    before = files_in(store)
    attempts = []

    def fail(*_, **__):
        attempts.append(call)
        raise OSError(code, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError) as caught:
            store.put(make_key(0), make_chunk(2.0))
    assert str(caught.value) == f"cannot write to {store.path}: {text}"
    assert attempts == [call]
    assert files_in(store) == before
    assert_same(store.get(make_key(0)), make_chunk(1.0))


def test_a_real_full_disk_says_so(make_chunk, make_key, tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount a tmpfs here")
    try:
        store = DiskStore(mount / "chunks")
        store.put(make_key(0), make_chunk())
        with pytest.raises(StoreError, match="no space left on device: free space or choose another store"):
            store.put(make_key(1), make_chunk(tokens=1000))
        assert list(store.keys()) == [make_key(0)]
        assert len(files_in(store)) == 1
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True, capture_output=True)
        reader = DiskStore(mount / "chunks")
        assert reader.get(make_key(0)) is not None
        with pytest.raises(
            StoreError, match="read-only file system: make it writable or choose another store"
        ):
            reader.put(make_key(1), make_chunk())
        with pytest.raises(StoreError, match=r"cannot delete from .*: read-only file system"):
            reader.delete(make_key(0))
    finally:
        subprocess.run(["umount", str(mount)], check=False, capture_output=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_interrupted_write_leaves_nothing_behind(store, make_chunk, make_key, monkeypatch, error, call):
    def interrupt(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, call, interrupt)
        with pytest.raises(error):
            store.put(make_key(0), make_chunk())
    assert files_in(store) == set()


def test_a_write_is_flushed_before_it_is_renamed_and_the_folder_after(
    store, make_chunk, make_key, monkeypatch
):
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("fsync folder" if is_folder else f"fsync {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def record_replace(source, target):
        calls.append("replace")
        assert Path(source).parent == Path(target).parent
        assert Path(source).name.startswith(f"{make_key(0)}.{os.getpid()}.")
        assert Path(source).suffix == ".tmp"
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    store.put(make_key(0), make_chunk())
    assert calls == [f"fsync {file_of(store, make_key(0)).stat().st_size}", "replace", "fsync folder"]


def test_opening_says_what_is_wrong(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: it is a file; name a folder with --store"):
        open_store(f"disk:{tmp_path / 'file'}")
    with pytest.raises(StoreError, match=r"cannot open .*: not a directory; choose another with --store"):
        open_store(f"disk:{tmp_path / 'file' / 'below'}")
    with pytest.raises(StoreError, match="cannot open ~nobody-of-this-name/x: "):
        open_store("disk:~nobody-of-this-name/x")

    def refuse(*_):
        raise OSError(errno.EACCES, "")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(StoreError, match="permission denied; choose another with --store"):
            DiskStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(StoreError, match="permission denied; choose another with --store"):
            DiskStore(tmp_path / "new")


def test_leftovers_are_swept_when_they_are_old(store, make_chunk, make_key, monkeypatch):
    store.put(make_key(0), make_chunk())
    shard = file_of(store, make_key(0)).parent
    old, young = (shard / f"{make_key(number)}.123.{'0' * 32}.tmp" for number in (0, 1))
    stray = shard / "mine.tmp"
    for path, age_s in ((old, 3700), (young, 3500), (stray, 3700)):
        path.write_bytes(b"half")
        written = time.time() - age_s
        os.utime(path, (written, written))
    DiskStore(store.path)
    assert [path.exists() for path in (old, young, stray)] == [False, True, True]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda _: (_ for _ in ()).throw(OSError(errno.EROFS, "")))
        assert DiskStore(store.path, sweep_after_s=60).get(make_key(0)) is not None
    assert young.exists()
    DiskStore(store.path, sweep_after_s=60)
    assert [path.exists() for path in (young, stray)] == [False, True]
    assert store.stats().entries == 1


class Writers:
    """A process that forks writers on demand; see writer_process.py."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(kvloom.__path__[0]).parent)}
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, mode: str, path: Path) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mode} {path}\n")
        self.process.stdin.flush()
        return int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def writers():
    writers = Writers()
    yield writers
    writers.close()


@pytest.fixture(scope="module")
def chunk_of_writer():
    return runpy.run_path(str(WRITER))["chunk"]


def test_a_writer_killed_within_a_write_leaves_one_leftover_and_no_entry(store, make_key, writers):
    child = writers.start("stall", store.path)
    assert writers.line() == "stalled"
    os.kill(child, signal.SIGKILL)
    assert writers.line() == f"gone {-signal.SIGKILL}"
    (leftover,) = files_in(store)
    assert leftover.endswith(".tmp")
    assert list(DiskStore(store.path).keys()) == []
    assert files_in(store) == {leftover}
    DiskStore(store.path, sweep_after_s=0)
    assert files_in(store) == set()


def test_writers_killed_at_any_moment_damage_nothing(store, make_key, writers, chunk_of_writer, assert_same):
    rng = random.Random(0)
    for _ in range(10):
        child = writers.start("loop", store.path)
        time.sleep(rng.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        assert writers.line() == f"gone {-signal.SIGKILL}"
    reopened = DiskStore(store.path, sweep_after_s=0)
    keys = list(reopened.keys())
    assert keys
    for number in range(4):
        if make_key(number) in keys:
            assert_same(reopened.get(make_key(number)), chunk_of_writer(number))
    assert reopened.verify() == []
    assert files_in(store) == {f"{key[:2]}/{key}.safetensors" for key in keys}


def test_two_processes_may_put_one_key_at_once(store, make_key, writers, chunk_of_writer, assert_same):
    writers.start("race", store.path)
    seen = set()
    deadline = time.monotonic() + 20
    while make_key(0) not in store:
        assert time.monotonic() < deadline
    for _ in range(40):
        kv = store.get(make_key(0))
        assert isinstance(kv, ChunkKV)
        seen.add(number := int(kv.keys[0][0, 0, 0]))
        assert_same(kv, chunk_of_writer(number))
    assert writers.line() == "gone 0"
    assert seen <= {0, 1}
    assert store.rejections == []
    assert files_in(store) == {f"{make_key(0)[:2]}/{make_key(0)}.safetensors"}


def test_a_vanished_file_is_a_plain_miss(store, make_chunk, make_key):
    store.put(make_key(0), make_chunk())
    file_of(store, make_key(0)).unlink()
    assert store.get(make_key(0)) is None
    assert store.rejections == []


def test_describe_reads_the_head_alone(store, make_chunk, make_key):
    key = make_key(0)
    assert store.describe(key) is None
    store.put(key, make_chunk(tokens=5))
    path = file_of(store, key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    head = store.describe(key)
    assert (head.key, head.num_tokens, head.num_bytes) == (key, 5, len(content))
    assert (head.fingerprint, head.start) == ("model-a", 7)
    assert store.rejections == []
    content[20] ^= 1
    path.write_bytes(content)
    assert store.describe(key) is None
    assert [rejection.key for rejection in store.rejections] == [key]


def test_the_quarantine_is_counted_by_whoever_opens_the_folder(store, make_chunk, make_key):
    for number in range(3):
        store.put(make_key(number), make_chunk())
    for number in range(2):
        os.truncate(file_of(store, make_key(number)), 10)
    store.verify()
    assert (store.stats().rejected, store.stats().quarantined, store.stats().entries) == (2, 2, 1)
    reopened = DiskStore(store.path).stats()
    assert (reopened.rejected, reopened.quarantined, reopened.entries) == (0, 2, 1)
