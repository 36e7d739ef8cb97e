"""Codecs, encryption and namespaces in every store that keeps bytes: disk, Redis, fsspec's file systems."""

from __future__ import annotations

import json
import random

import fsspec
import pytest
import redis
import torch
from byte_tokenizer import ByteTokenizer
from redis_server import BINARY, Server
from tiny_models import FAMILIES, build

from kvloom.chunk_source import ChunkSource
from kvloom.errors import MethodError, StoreError
from kvloom.loom import Loom
from kvloom.store import MemoryStore, Store, open_store
from kvloom.store.codecs import Coding
from kvloom.store.encryption import ENVIRONMENT, StoreKey
from kvloom.store.lookup import Miss
from kvloom.store.namespace import namespace_id
from kvloom.store.packing import Packing
from kvloom.store.tiers import TieredStore
from kvloom.trace import Trace

pytest.importorskip("zstandard")
pytest.importorskip("cryptography")
SECRET, OTHER = StoreKey(bytes(range(32))), StoreKey(bytes(32))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


class Place:
    """Where a store keeps its bytes, and the bytes themselves behind its back."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, options: str = "") -> Store:
        return open_store(f"{self.url}{'?' if options else ''}{options}")

    def read(self, key: str, namespace: str = "") -> bytes:
        raise NotImplementedError

    def write(self, key: str, content: bytes) -> None:
        raise NotImplementedError


class Files(Place):
    def __init__(self, url: str, folder: str) -> None:
        super().__init__(url)
        self.fs, self.folder = fsspec.core.url_to_fs(folder)

    def path(self, key: str, namespace: str = "") -> str:
        room = f"/namespaces/{namespace_id(namespace)}" if namespace else ""
        return f"{self.folder}{room}/{key[:2]}/{key}.safetensors"

    def read(self, key: str, namespace: str = "") -> bytes:
        return self.fs.cat_file(self.path(key, namespace))

    def write(self, key: str, content: bytes) -> None:
        self.fs.pipe_file(self.path(key), content)


class Values(Place):
    def __init__(self, url: str, client: redis.Redis) -> None:
        super().__init__(url)
        self.client = client

    def read(self, key: str, namespace: str = "") -> bytes:
        room = f"{namespace_id(namespace)}:" if namespace else ""
        content = self.client.get(f"kvloom:{room}{key}")
        assert isinstance(content, bytes)
        return content

    def write(self, key: str, content: bytes) -> None:
        self.client.set(f"kvloom:{key}", content)


@pytest.fixture(params=["disk", "redis", "file", "memory"])
def place(request, tmp_path):
    if request.param == "redis":
        if BINARY is None:
            pytest.skip("no redis-server here")
        server = request.getfixturevalue("server")
        client = redis.Redis(port=server.port)
        client.flushall()
        yield Values(f"redis://127.0.0.1:{server.port}/0", client)
        client.close()
    elif request.param == "disk":
        yield Files(f"disk:{tmp_path}/kv", f"file://{tmp_path}/kv")
    else:
        folder = f"file://{tmp_path}/kv" if request.param == "file" else f"memory://bucket-{tmp_path.name}/kv"
        yield Files(f"fsspec:{folder}", folder)


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def keys(tmp_path):
    """Key files: ours and another one."""
    paths = tmp_path / "ours.key", tmp_path / "other.key"
    for path, secret in zip(paths, (SECRET, OTHER), strict=True):
        path.write_text(secret.secret.hex())
    return paths


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp8+zstd", "int8", "int4+zstd"])
def test_each_store_writes_by_the_codec_and_reads_every_other(
    place, make_chunk, make_key, assert_same, codec
):
    kv, key = make_chunk(1 / 3, tokens=9, dtype=torch.bfloat16), make_key(0)
    packing = Packing.of(codec=codec)
    content = b"".join(packing.pack(key, kv))
    written = place(f"codec={codec}")
    written.put(key, kv)
    assert place.read(key) == content
    for store in (written, place(), place("codec=int4")):
        found = store.lookup(key)
        assert found.num_bytes == len(content)
        assert_same(found.kv, packing.unpack(key, memoryview(bytearray(content))))
        assert found.kv.keys[0].dtype == torch.bfloat16
        head = store.describe(key)
        assert (head.codec, head.is_encrypted, head.num_tokens) == (codec, False, 9)
        assert store.verify() == []


def test_a_plus_may_be_written_as_it_is_or_escaped(place, make_chunk, make_key):
    for number, codec in enumerate(("int8+zstd", "int8%2Bzstd")):
        store = place(f"codec={codec}")
        store.put(make_key(number), make_chunk())
        assert store.describe(make_key(number)).codec == "int8+zstd"


def test_an_encrypted_entry_needs_its_key(place, keys, make_chunk, make_key, assert_same):
    ours, key = place(f"key_file={keys[0]}"), make_key(0)
    ours.put(key, make_chunk(1 / 3))
    sealed = place.read(key)
    assert b"keys.0" not in sealed
    for options, reason in (
        ("", f"is encrypted with the key {SECRET.id}; give it as key_file=FILE or $KVLOOM_STORE_KEY"),
        (
            f"key_file={keys[1]}",
            f"is encrypted with the key {SECRET.id}, not with {OTHER.id}; give the first as",
        ),
    ):
        theirs = place(options)
        found = theirs.lookup(key)
        assert (found.kv, found.reason) == (None, Miss.UNREADABLE)
        assert reason in found.detail
        assert [rejection.set_aside for rejection in theirs.rejections] == [False]
        assert theirs.describe(key).is_encrypted
    assert place.read(key) == sealed
    assert_same(place(f"codec=int4&key_file={keys[0]}").get(key), make_chunk(1 / 3))


def test_plain_entries_do_not_count_where_only_encrypted_ones_do(place, keys, make_chunk, make_key):
    place().put(make_key(0), make_chunk())
    strict = place(f"key_file={keys[0]}&encrypted_only=true")
    assert strict.lookup(make_key(0)).reason is Miss.UNREADABLE
    assert "is not encrypted, and the store takes no other" in strict.rejections[0].reason
    with pytest.raises(MethodError, match="encrypted_only needs a key"):
        place("encrypted_only=true")


def test_namespaces_see_nothing_of_each_other(place, make_chunk, make_key, assert_same):
    """Not even by the other's own keys, nor does whoever has none see those who have one."""
    names = ["", "acme", "../acme", "名 前"]
    stores = [open_store(place.url, namespace=name or None) for name in names]
    for number, store in enumerate(stores):
        assert store.namespace == names[number]
        store.put(make_key(number), make_chunk(number))
        assert place.read(make_key(number), names[number])
    for number, store in enumerate(stores):
        assert list(store.keys()) == [make_key(number)]
        assert store.stats().entries == 1
        for other in set(range(len(names))) - {number}:
            assert store.lookup(make_key(other)).kv is None
            assert make_key(other) not in store
            assert store.describe(make_key(other)) is None
            assert store.delete(make_key(other)) is False
        assert store.verify() == []
        assert_same(store.get(make_key(number)), make_chunk(number))
    again = place("namespace=acme")
    assert list(again.keys()) == [make_key(1)]
    ids = torch.arange(3)
    assert len({store.chunk_key("m", ids, ids) for store in [*stores, again]}) == len(names)


PACKINGS = ["", "codec=int8", "codec=int4%2Bzstd", "key_file=KEY", "codec=fp8&key_file=KEY"]


def offsets(content: bytes) -> dict[str, int]:
    """One offset in each part of a file: length, header, each metadata entry, shape, each tensor, end."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    found = {"length": 1, "first of header": 8, "shape": content.index(b'"shape":[') + 9}
    for name, value in header.pop("__metadata__").items():
        if name != "version":  # a later one is told apart by design
            found[name] = content.index(f'"{name}":"{value}"'.encode()) + len(name) + 4
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        found |= {
            f"first of {name}": begin,
            f"middle of {name}": (begin + end) // 2,
            f"last of {name}": end - 1,
        }
    return found


@pytest.mark.parametrize("options", PACKINGS)
def test_no_changed_byte_is_ever_served(place, keys, make_chunk, make_key, options):
    options, key = options.replace("KEY", str(keys[0])), make_key(0)
    place(options).put(key, make_chunk(1 / 3, tokens=5))
    content = place.read(key)
    for name, offset in offsets(content).items():
        changed = bytearray(content)
        changed[offset] ^= 4
        place.write(key, bytes(changed))
        store = place(options)
        found = store.lookup(key)
        assert (found.kv, found.reason) == (None, Miss.DAMAGED), name
        assert found.detail == store.rejections[0].reason
        assert key not in store
    place.write(key, content)
    assert place(options).get(key) is not None


@pytest.mark.parametrize("options", PACKINGS)
def test_an_entry_cut_short_anywhere_is_damaged(place, keys, make_chunk, make_key, options):
    options, key = options.replace("KEY", str(keys[0])), make_key(0)
    store = place(options)
    store.put(key, make_chunk(1 / 3, tokens=5))
    content = place.read(key)
    for length in random.Random(0).sample(range(len(content)), 100):
        place.write(key, content[:length])
        found = store.lookup(key)
        assert (found.kv, found.reason) == (None, Miss.DAMAGED), length
        assert "is damaged" in found.detail
    assert len(store.rejections) == 100


# --- memory and tiers


@pytest.mark.parametrize("option", ["codec=int8", "key_file=a.key", "encrypted_only=true"])
def test_a_memory_store_says_that_it_packs_nothing(option):
    name = option.partition("=")[0]
    with pytest.raises(MethodError) as caught:
        open_store(f"memory:1GiB?{option}")
    assert str(caught.value) == (
        f"store 'memory' has no option '{name}': it keeps chunks as they are, without files; "
        "give it to a disk, redis or fsspec store"
    )


def test_tiers_have_one_namespace(tmp_path, make_chunk, make_key):
    store = open_store(f"memory:1MiB?namespace=acme,disk:{tmp_path}/kv?namespace=acme&codec=int8")
    assert isinstance(store, TieredStore)
    assert store.namespace == "acme"
    ids = torch.arange(3)
    assert store.chunk_key("m", ids, ids) == store.parts[0].chunk_key("m", ids, ids)
    with pytest.raises(MethodError) as caught:
        open_store(f"memory:,disk:{tmp_path}/kv?namespace=acme")
    assert str(caught.value) == (
        "tiers have one namespace in common, got none for memory, 'acme' for disk; give each the same"
    )
    for url in (f"memory:1MiB,disk:{tmp_path}/kv?codec=int8", f"tiers:memory:1MiB,disk:{tmp_path}/kv"):
        again = open_store(url, namespace="acme")
        assert {part.namespace for part in [again, *again.parts]} == {"acme"}
    store.put(make_key(0), make_chunk())
    assert store.flush()
    assert list(open_store(f"disk:{tmp_path}/kv", namespace="acme").keys()) == [make_key(0)]
    assert list(open_store(f"disk:{tmp_path}/kv").keys()) == []


def test_a_namespace_beside_the_url(tmp_path):
    with pytest.raises(MethodError, match="option 'namespace' is given twice"):
        open_store(f"disk:{tmp_path}?namespace=acme", namespace="acme")
    with pytest.raises(MethodError, match="namespace '' is not printable text of 1 to 200 characters"):
        open_store(f"disk:{tmp_path}", namespace="")
    store = MemoryStore(namespace="acme")
    assert open_store(store, namespace="acme") is store
    with pytest.raises(MethodError, match="the store is open in namespace 'acme', not in 'zeta'"):
        open_store(store, namespace="zeta")
    with pytest.raises(MethodError, match="is not printable text"):
        MemoryStore(namespace="a\nb")


def test_a_tier_may_be_smaller_than_the_one_above(tmp_path, make_chunk, make_key, assert_same):
    """What memory has is exact, what comes back from the disk is within the codec's bound."""
    url = f"memory:1MiB,disk:{tmp_path}/kv?codec=int4"
    store, kv, key = open_store(url), make_chunk(1 / 3), make_key(0)
    store.put(key, kv)
    assert_same(store.get(key), kv)
    again = open_store(url).get(key)
    assert again is not None
    assert again.keys[0].dtype == kv.keys[0].dtype
    assert not again.keys[0].equal(kv.keys[0])
    torch.testing.assert_close(again.keys[0], kv.keys[0], rtol=0.07, atol=0)


def test_documents_live_in_their_namespace(tmp_path, make_chunk, make_key):
    """The same id in two namespaces and without one: three documents, none of which another's owner sees."""
    url = f"memory:1MiB,disk:{tmp_path}/kv"
    stores = {name: open_store(url, namespace=name) for name in (None, "acme", "zeta")}
    for number, store in enumerate(stores.values()):
        store.put(make_key(number), make_chunk(number))
        store.documents.record("report", [make_key(number)], source=f"/secret/{number}")
    for number, (name, store) in enumerate(stores.items()):
        for opened in (store, open_store(f"disk:{tmp_path}/kv", namespace=name)):
            (document,) = opened.documents.all()
            assert (document.keys, document.source) == ((make_key(number),), f"/secret/{number}")
            assert opened.documents.users([make_key(n) for n in range(3)]) == {make_key(number): 1}
    assert stores["acme"].documents.remove("report").freed == (make_key(1),)
    assert stores["acme"].documents.all() == []
    assert stores["zeta"].documents.get("report") is not None
    rebuilt = open_store(f"disk:{tmp_path}/kv", namespace="zeta")
    assert rebuilt.rebuild() == 1
    assert len(rebuilt.documents.all()) == 1
    assert stores[None].get(make_key(0)) is not None


def test_pins_and_quota_are_of_the_namespace(tmp_path, make_chunk, make_key):
    size = len(b"".join(Packing().pack(make_key(0), make_chunk())))
    stores = [
        open_store(f"disk:{tmp_path}/kv?quota={2 * size}", namespace=name) for name in (None, "acme", "zeta")
    ]
    for store in stores:
        for number in range(2):
            store.put(make_key(number), make_chunk())
    assert stores[1].pin(make_key(0))
    assert [store.stats().pinned for store in stores] == [0, 1, 0]
    for number in (2, 3):
        stores[1].put(make_key(number), make_chunk())
    assert set(stores[1].keys()) == {make_key(0), make_key(3)}
    assert all(set(store.keys()) == {make_key(0), make_key(1)} for store in (stores[0], stores[2]))


def test_an_index_of_the_version_before_learns_codecs(tmp_path, make_chunk, make_key):
    store = open_store(f"disk:{tmp_path}?codec=int8")
    store.put(make_key(0), make_chunk())
    assert store.index.chunk(make_key(0)).codec == "int8"
    store.index.run(lambda db: db.execute("ALTER TABLE chunks DROP COLUMN codec"))
    store.index.run(lambda db: db.execute("PRAGMA user_version = 1"))
    store.index.close()
    again = open_store(f"disk:{tmp_path}")
    assert again.index.chunk(make_key(0)) is None  # the index was made anew; the files know
    assert again.rebuild() == 1
    assert again.index.chunk(make_key(0)).codec == "int8"
    assert not (tmp_path / "index.sqlite.damaged").exists()


def test_a_codec_that_cannot_hold_the_chunk_writes_nothing(place, make_chunk, make_key):
    store = place("codec=int8")
    with pytest.raises(StoreError, match=r"keys\.0 holds infinities"):
        store.put(make_key(0), make_chunk(torch.inf))
    assert list(store.keys()) == []


@pytest.mark.parametrize("options", ["codec=bf16", "codec=fp8", "codec=int8+zstd", "codec=int4&key_file=KEY"])
def test_a_model_gets_back_its_dtype_from_every_codec(tmp_path, keys, options):
    """What a codec gives back passes for the chunk that was asked for, and is not computed again."""
    header, chunk = torch.arange(5), torch.arange(20, 60)
    for dtype in (torch.float32, torch.bfloat16):
        decoder = Loom(build(FAMILIES["llama"]).to(dtype), ByteTokenizer(eos_token=None)).decoder
        url = f"disk:{tmp_path}/{dtype}?{options.replace('KEY', str(keys[0]))}"
        found = []
        for counts in ((45, 0), (0, 45)):
            source, trace = ChunkSource(decoder, open_store(url)), Trace()
            found.append(dict(source.supply(header, header, [chunk], trace)))
            assert (trace.prefilled_tokens, trace.reused_tokens) == counts
            assert source.store.rejections == []
        computed, loaded = (run[0] for run in found)
        assert {tensor.dtype for tensor in (*loaded.keys, *loaded.values)} == {dtype}
        codec = Coding.parse(options.removeprefix("codec=").partition("&")[0]).codec
        for kind, ours, theirs in (
            ("keys", loaded.keys, computed.keys),
            ("values", loaded.values, computed.values),
        ):
            for mine, its in zip(ours, theirs, strict=True):
                assert ((mine.double() - its.double()).abs() <= codec.bound(kind, its)).all()
