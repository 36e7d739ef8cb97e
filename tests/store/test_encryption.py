from __future__ import annotations

import json
import os
import random
import stat
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash

from kvloom.errors import MethodError, StoreError
from kvloom.store import DiskStore, chunk_key, open_store
from kvloom.store import encryption as encryption_module
from kvloom.store.container import read_header
from kvloom.store.encryption import ENVIRONMENT, StoreKey, unseal
from kvloom.store.format import DamagedEntry, UnreadableEntry
from kvloom.store.packing import Packing

if TYPE_CHECKING:
    from kvloom.kv import ChunkKV

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
SECRET, OTHER = StoreKey(bytes(range(32))), StoreKey(bytes(32))
PACKING = Packing(secret=SECRET)
KEY = chunk_key("model-a", torch.tensor([1, 2]), torch.tensor([3, -4]))


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def key_file(tmp_path) -> Path:
    path = tmp_path / "store.key"
    path.write_text(SECRET.secret.hex() + "\n")
    return path


@pytest.fixture(scope="session")
def example(make_chunk):
    return make_chunk(1 / 3, tokens=5)


def buffer(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


def file_of(kv: ChunkKV, packing: Packing = PACKING) -> bytes:
    return b"".join(packing.pack(KEY, kv))


def path_of(store: DiskStore, key: str) -> Path:
    return store.path / key[:2] / f"{key}.safetensors"


def split(content: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def fields(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def named(metadata: dict) -> list[bytes]:
    return [part.encode() for name in sorted(set(metadata) - {"checksum"}) for part in (name, metadata[name])]


def resealed(header: dict, tensors: bytes) -> bytes:
    """The file with a checksum that is right, so that only the cipher can find what was changed."""
    entry = header["sealed"]
    shape = str(entry["shape"][0])
    parts = [*named(header["__metadata__"]), b"sealed", b"U8", shape.encode(), tensors]
    header["__metadata__"]["checksum"] = "xxh3_128:" + xxhash.xxh3_128(fields(parts)).hexdigest()
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def test_round_trip_of_every_dtype(make_chunk, assert_same):
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        kv = make_chunk(1 / 3, dtype=dtype)
        assert_same(PACKING.unpack(KEY, buffer(file_of(kv))), kv)


def test_the_document_is_enough_to_decrypt(example):
    """Written from docs/format.md alone; what comes out is the plain file, byte for byte."""
    header, tensors = split(file_of(example))
    metadata = header.pop("__metadata__")
    assert {name: metadata[name] for name in ("format", "version", "cipher", "codec", "num_tokens")} == {
        "format": "kvloom-chunk",
        "version": "2",
        "cipher": "aes-256-gcm",
        "codec": "raw",
        "num_tokens": "5",
    }
    assert list(header) == ["sealed"]
    assert header["sealed"] == {"dtype": "U8", "shape": [len(tensors)], "data_offsets": [0, len(tensors)]}
    associated = fields(named(metadata))
    plain = aead.AESGCM(SECRET.secret).decrypt(bytes.fromhex(metadata["nonce"]), tensors, associated)
    assert plain == file_of(example, Packing())


def test_the_key_id_is_the_one_in_the_documentation():
    assert SECRET.id == "9e88f537c53d3c12"
    assert SECRET.id in (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


def test_a_nonce_is_never_used_twice(example):
    nonces = {split(file_of(example))[0]["__metadata__"]["nonce"] for _ in range(20)}
    assert len(nonces) == 20


def test_nothing_of_the_content_is_in_clear(example):
    content = file_of(example)
    assert b"keys.0" not in content
    assert example.keys[0].numpy().tobytes() not in content
    assert example.token_ids.numpy().tobytes() not in content


def test_the_secret_is_not_in_the_representation():
    assert SECRET.secret.hex() not in repr(PACKING)
    assert repr(SECRET.secret) not in repr(PACKING)


def test_any_changed_byte_is_damage_even_without_the_key(example):
    content = file_of(example)
    rng = random.Random(0)
    spared = content.index(b'"version":"2') + len('"version":"')
    for offset in range(len(content)):
        if offset == spared:
            continue
        changed = bytearray(content)
        changed[offset] ^= rng.randrange(1, 256)
        for packing in (PACKING, Packing()):
            with pytest.raises(DamagedEntry):
                packing.unpack(KEY, memoryview(bytearray(changed)))


def test_any_truncation_is_damage(example):
    content = file_of(example)
    for length in range(len(content)):
        with pytest.raises(DamagedEntry):
            PACKING.unpack(KEY, buffer(content[:length]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("fingerprint", "model-b"), ("start", "8"), ("num_tokens", "6"), ("codec", "int8"), ("nonce", "0" * 24)],
)
def test_what_stands_in_clear_is_authenticated(example, name, value):
    header, tensors = split(file_of(example))
    header["__metadata__"][name] = value
    with pytest.raises(DamagedEntry, match="it was changed after it was encrypted"):
        PACKING.unpack(KEY, buffer(resealed(header, tensors)))


def test_the_content_is_authenticated_by_more_than_the_checksum(example):
    header, tensors = split(file_of(example))
    assert PACKING.unpack(KEY, buffer(resealed(header, tensors))).num_tokens == 5
    with pytest.raises(DamagedEntry, match="it was changed after it was encrypted"):
        PACKING.unpack(KEY, buffer(resealed(header, tensors[:-1] + bytes([tensors[-1] ^ 1]))))


def test_the_entry_of_one_key_does_not_pass_for_another(example):
    header, tensors = split(file_of(example))
    other = "0" * 64
    with pytest.raises(DamagedEntry, match="holds the chunk of another key"):
        PACKING.unpack(other, buffer(resealed(header, tensors)))
    header["__metadata__"]["key"] = other
    with pytest.raises(DamagedEntry, match="it was changed after it was encrypted"):
        PACKING.unpack(other, buffer(resealed(header, tensors)))


@pytest.mark.parametrize("nonce", ["", "0" * 22, "0" * 26, "G" * 24])
def test_a_nonce_of_another_form_is_damage(example, nonce):
    header, tensors = split(file_of(example))
    header["__metadata__"]["nonce"] = nonce
    with pytest.raises(DamagedEntry, match="its nonce is"):
        PACKING.unpack(KEY, buffer(resealed(header, tensors)))


def test_another_cipher_is_no_damage(example):
    header, tensors = split(file_of(example))
    header["__metadata__"]["cipher"] = "aegis-256"
    with pytest.raises(UnreadableEntry, match="is encrypted by 'aegis-256'; update kvloom"):
        PACKING.unpack(KEY, buffer(resealed(header, tensors)))


def test_another_tensor_is_damage(example):
    content = buffer(file_of(example).replace(b'"sealed":', b'"stored":'))
    with pytest.raises(DamagedEntry, match="its tensors are not those of an encrypted entry"):
        unseal(content, read_header(content), SECRET)


def test_a_wrong_key_is_a_miss_that_stays_and_says_which(
    tmp_path, key_file, make_key, make_chunk, assert_same
):
    ours = DiskStore(tmp_path / "chunks", packing=Packing.of(key_file=key_file))
    ours.put(make_key(0), make_chunk())
    path = path_of(ours, make_key(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wrong = tmp_path / "other.key"
    wrong.write_text(OTHER.secret.hex())
    for options, reason in (
        (
            {"key_file": wrong},
            f"is encrypted with the key {SECRET.id}, not with {OTHER.id}; give the first as",
        ),
        ({}, f"is encrypted with the key {SECRET.id}; give it as key_file=FILE or $KVLOOM_STORE_KEY"),
    ):
        theirs = DiskStore(tmp_path / "chunks", packing=Packing.of(**options))
        assert theirs.get(make_key(0)) is None
        assert theirs.get(make_key(0)) is None
        (rejection,) = theirs.rejections
        assert reason in rejection.reason
        assert rejection.set_aside is False
        head = theirs.describe(make_key(0))
        assert head is not None
        assert (head.num_tokens, head.start, head.is_encrypted) == (3, 7, True)
    assert_same(ours.get(make_key(0)), make_chunk())
    assert ours.verify() == []


def test_plain_entries_are_read_unless_only_encrypted_ones_count(
    tmp_path, key_file, make_key, make_chunk, assert_same
):
    DiskStore(tmp_path / "chunks").put(make_key(0), make_chunk())
    assert_same(
        DiskStore(tmp_path / "chunks", packing=Packing.of(key_file=key_file)).get(make_key(0)), make_chunk()
    )
    strict = open_store(f"disk:{tmp_path / 'chunks'}?key_file={key_file}&encrypted_only=true")
    assert strict.get(make_key(0)) is None
    (rejection,) = strict.rejections
    assert "is not encrypted, and the store takes no other" in rejection.reason
    assert rejection.set_aside is False
    strict.put(make_key(0), make_chunk())
    assert_same(strict.get(make_key(0)), make_chunk())


def test_codecs_work_under_encryption(tmp_path, key_file, make_key, make_chunk):
    pytest.importorskip("zstandard")
    store = open_store(f"disk:{tmp_path / 'chunks'}?codec=int8+zstd&key_file={key_file}")
    store.put(make_key(0), make_chunk(2.0))
    head, kv = store.describe(make_key(0)), store.get(make_key(0))
    assert head is not None
    assert kv is not None
    assert (head.codec, head.is_encrypted) == ("int8+zstd", True)
    torch.testing.assert_close(kv.keys[0], torch.full((2, 3, 4), 2.0), rtol=0.01, atol=0)


def test_the_key_may_come_from_the_environment(tmp_path, monkeypatch, key_file, make_key, make_chunk):
    monkeypatch.setenv(ENVIRONMENT, SECRET.secret.hex().upper())
    store = DiskStore(tmp_path / "chunks")
    store.put(make_key(0), make_chunk())
    head = store.describe(make_key(0))
    assert head is not None
    assert head.is_encrypted
    monkeypatch.setenv(ENVIRONMENT, OTHER.secret.hex())
    assert DiskStore(tmp_path / "chunks").get(make_key(0)) is None
    assert DiskStore(tmp_path / "chunks", packing=Packing.of(key_file=key_file)).get(make_key(0)) is not None


@pytest.mark.parametrize("text", ["", "secret", "0" * 63, "0" * 65, "g" * 64, "schlüssel"])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path, monkeypatch, text):
    path = tmp_path / "bad.key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        StoreError, match="is not a key of 64 hexadecimal characters; make one with"
    ) as caught:
        DiskStore(tmp_path / "chunks", packing=Packing.of(key_file=path))
    assert not text or f" {text} " not in str(caught.value)
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(StoreError, match=r"\$KVLOOM_STORE_KEY is not a key"):
        DiskStore(tmp_path / "chunks")
    assert not (tmp_path / "chunks").exists()


def test_a_key_file_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match=r"cannot read the key file .*none.key: No such file"):
        DiskStore(tmp_path, packing=Packing.of(key_file=tmp_path / "none.key"))


def test_a_key_of_another_length_is_refused():
    with pytest.raises(MethodError, match="a store's key has 32 bytes, got 16"):
        StoreKey(bytes(16))


def test_encrypted_only_needs_a_key(tmp_path):
    with pytest.raises(MethodError, match="encrypted_only needs a key"):
        DiskStore(tmp_path, packing=Packing.of(encrypted_only=True))


def test_encryption_without_its_package(monkeypatch, tmp_path, key_file):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MethodError, match=r"pip install 'kvloom\[crypto\]'"):
        DiskStore(tmp_path, packing=Packing.of(key_file=key_file))


def test_an_entry_too_large_for_the_cipher_is_refused(monkeypatch, example):
    monkeypatch.setattr(encryption_module, "MAX_BYTES", 1000)
    with pytest.raises(StoreError, match="is beyond the 1,000 that can be encrypted"):
        file_of(example)


def test_an_entry_damaged_on_disk_is_set_aside(tmp_path, key_file, make_key, make_chunk):
    store = DiskStore(tmp_path / "chunks", packing=Packing.of(key_file=key_file))
    store.put(make_key(0), make_chunk())
    path = path_of(store, make_key(0))
    os.truncate(path, path.stat().st_size - 1)
    assert store.get(make_key(0)) is None
    assert [rejection.set_aside for rejection in store.rejections] == [True]
