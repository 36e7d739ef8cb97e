"""Format version 2: entries that a codec made."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.errors import MethodError, StoreError
from kvloom.kv import ChunkKV
from kvloom.store import DiskStore, chunk_key, format, open_store
from kvloom.store.codecs import Coding, codecs
from kvloom.store.encryption import StoreKey
from kvloom.store.format import DamagedEntry, NewerFormat, UnreadableEntry, decode, decode_head, encode
from kvloom.store.packing import Packing

pytest.importorskip("zstandard")
pytest.importorskip("cryptography")
KEY = chunk_key("model-a", torch.tensor([1, 2]), torch.tensor([3, -4]))
SECRET = StoreKey(bytes(range(32)))
CODINGS = [f"{name}{suffix}" for name in codecs for suffix in ("", "+zstd")]
CODED = [text for text in CODINGS if text != "raw"]


def buffer(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


def file_of(kv: ChunkKV, coding: str) -> bytes:
    return b"".join(encode(KEY, kv, Coding.parse(coding)))


def example() -> ChunkKV:
    """The one of docs/format.md."""
    keys = torch.tensor([[[1.0], [2.0]]])
    values = torch.tensor([[[0.5, -0.5], [0.25, 0.0]]]).bfloat16()
    return ChunkKV(torch.tensor([3, -4]), (keys,), (values,), fingerprint="model-a", start=2)


def split(content: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict, tensors: bytes) -> bytes:
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def checksum_by_the_document(content: bytes) -> str:
    """Written from docs/format.md alone, to hold the document to its word."""
    header, tensors = split(content)
    metadata = header.pop("__metadata__")
    parts = []
    for name in sorted(set(metadata) - {"checksum"}):
        parts += [name.encode(), metadata[name].encode()]
    for name in sorted(header):
        entry = header[name]
        begin, end = entry["data_offsets"]
        shape = ",".join(map(str, entry["shape"]))
        parts += [name.encode(), entry["dtype"].encode(), shape.encode(), tensors[begin:end]]
    return "xxh3_128:" + xxhash.xxh3_128(b"".join(struct.pack("<Q", len(p)) + p for p in parts)).hexdigest()


def sealed(header: dict, tensors: bytes) -> bytes:
    """The file with a checksum that is right, so that nothing but the header can be at fault."""
    header["__metadata__"]["checksum"] = checksum_by_the_document(join(header, tensors))
    return join(header, tensors)


@st.composite
def chunks(draw):
    """Chunks of several dtypes in one, whole or with rows dropped, of no layers and no tokens too."""
    tokens, layers, heads = draw(st.integers(0, 70)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    is_partial = draw(st.booleans()) and layers > 0
    held = [draw(st.integers(0, tokens)) if is_partial else tokens for _ in range(layers)]
    rows = tuple(
        torch.stack([torch.randperm(tokens, generator=rng)[:n].sort().values for _ in range(heads)]).int()
        for n in held
    )
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    keys, values = (
        tuple(torch.randn(heads, n, draw(st.integers(0, 5)), generator=rng).to(draw(dtypes)) for n in held)
        for _ in range(2)
    )
    return ChunkKV(
        torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=rng),
        keys,
        values,
        fingerprint=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=4)),
        start=draw(st.integers(0, 10**9)),
        rows=rows if is_partial else None,
        compressor="Knorm(keep=0.5)" if is_partial else "",
    )


@pytest.mark.parametrize("coding", CODINGS)
@settings(max_examples=25, deadline=None)
@given(kv=chunks())
def test_what_comes_back_is_within_the_bound_and_all_else_is_the_same(coding, kv):
    content = file_of(kv, coding)
    got = decode(KEY, buffer(content))
    assert (got.fingerprint, got.start, got.compressor) == (kv.fingerprint, kv.start, kv.compressor)
    assert torch.equal(got.token_ids, kv.token_ids)
    assert (got.rows is None) == (kv.rows is None)
    assert all(map(torch.equal, got.rows or (), kv.rows or ()))
    codec = Coding.parse(coding).codec
    for kind, ours, theirs in (("keys", got.keys, kv.keys), ("values", got.values, kv.values)):
        assert len(ours) == len(theirs)
        for mine, its in zip(ours, theirs, strict=True):
            assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
            assert ((mine.double() - its.double()).abs() <= codec.bound(kind, its)).all()
    metadata = split(content)[0]["__metadata__"]
    assert metadata["version"] == ("1" if coding == "raw" else "2")
    assert metadata.get("codec", "raw") == coding
    head = decode_head(KEY, memoryview(content), len(content))
    assert (head.num_tokens, head.start, head.codec) == (kv.num_tokens, kv.start, coding)
    assert content == file_of(kv, coding)
    packing = Packing(coding=Coding.parse(coding), secret=SECRET)
    unsealed = packing.unpack(KEY, buffer(b"".join(packing.pack(KEY, kv))))
    assert file_of(unsealed, "raw") == file_of(got, "raw")


@settings(max_examples=25, deadline=None)
@given(kv=chunks(), coding=st.sampled_from(CODED))
def test_the_document_gives_the_checksum_and_the_library_reads_the_file(kv, coding):
    content = file_of(kv, coding)
    assert split(content)[0]["__metadata__"]["checksum"] == checksum_by_the_document(content)
    loaded = safetensors.torch.load(content)
    assert torch.equal(loaded["token_ids"], kv.token_ids)
    assert len(loaded) == len(split(content)[0]) - 1


def test_the_example_of_the_document(tmp_path):
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(file_of(example(), "int4"))
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        codes = {name: file.get_tensor(name).tolist() for name in sorted(file.keys())}
    assert metadata["plain"] == "F32 1,2,1;BF16 1,2,2"
    assert codes["keys.0.codes"] == [0xF0]
    assert codes["keys.0.middle"] == [[[1.5]]]
    assert codes["keys.0.step"] == [[[pytest.approx(1 / 15, rel=2**-7)]]]
    assert codes["values.0.codes"] == [0x0F, 0x0F]
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    assert metadata["checksum"] in document
    assert metadata["plain"] in document


@pytest.mark.parametrize("coding", ["int4", "int8+zstd", "fp8"])
def test_any_changed_byte_is_found(coding):
    content = file_of(example(), coding)
    spared = {content.index(b'"version":"2') + len('"version":"')}  # "3" would be a later version
    rng = random.Random(0)
    for offset in range(len(content)):
        for mask in {1, 4, 0x20, 0x2A, 0x80, rng.randrange(1, 256)}:
            changed = bytearray(content)
            changed[offset] ^= mask
            faults = (DamagedEntry, NewerFormat) if offset in spared else DamagedEntry
            with pytest.raises(faults):
                decode(KEY, memoryview(changed))


@pytest.mark.parametrize("coding", CODED)
def test_any_truncation_is_found(coding):
    content = file_of(example(), coding)
    for length in range(len(content)):
        with pytest.raises(DamagedEntry, match="is damaged"):
            decode(KEY, buffer(content[:length]))
    with pytest.raises(DamagedEntry, match="its tensors end at"):
        decode(KEY, buffer(content + b"\0"))


def test_the_seal_of_these_tests_is_right():
    assert decode(KEY, buffer(sealed(*split(file_of(example(), "int8"))))).num_tokens == 2


PLAIN_FAULT = "its dtypes and shapes are not those of its layers"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("__metadata__", {"plain": "F32 1,2,1"}, PLAIN_FAULT),
        ("__metadata__", {"plain": "F32 1,2,1;BF16 1,2,2;F32 1,2,2"}, PLAIN_FAULT),
        ("__metadata__", {"plain": "I64 1,2,1;BF16 1,2,2"}, PLAIN_FAULT),
        ("__metadata__", {"plain": "F32 1,-2,1;BF16 1,2,2"}, PLAIN_FAULT),
        ("__metadata__", {"plain": "F32 1,2;BF16 1,2,2"}, PLAIN_FAULT),
        ("__metadata__", {"plain": ""}, PLAIN_FAULT),
        ("__metadata__", {"plain": f"F32 {'9' * 18},2,1;BF16 1,2,2"}, "claim to expand to"),
        ("__metadata__", {"plain": "F32 1,3,1;BF16 1,2,2"}, "keys.0.codes is torch.uint8"),
        ("__metadata__", {"plain": "F32 1,2,1;BF16 1,2,3"}, "values.0.codes is torch.uint8"),
        ("__metadata__", {"num_layers": "2"}, "2 layers do not have 7 tensors|" + PLAIN_FAULT),
        ("__metadata__", {"num_layers": "999999999999999999"}, "layers do not have 7 tensors"),
        ("__metadata__", {"codec": "bf16"}, "its tensors are not those of the codec bf16"),
        ("__metadata__", {"codec": "int4"}, "keys.0.codes is torch.uint8"),
        ("__metadata__", {"codec": "int8+zstd"}, "keys.0.codes is not a list of bytes"),
        ("__metadata__", {"note": "x"}, "its metadata are not the expected ones"),
        ("__metadata__", {"cipher": "x"}, "its metadata are not the expected ones"),
        ("__metadata__", {"codec": 8}, "its metadata are not all text"),
        ("keys.0.step", {"dtype": "F16"}, "keys.0.step is torch.float16"),
        ("keys.0.step", {"shape": [1, 1]}, "keys.0.step is torch.bfloat16"),
    ],
)
def test_a_header_that_lies_under_a_right_checksum_is_found(name, change, reason):
    header, tensors = split(file_of(example(), "int8"))
    header[name] |= change
    try:
        content = sealed(header, tensors)
    except AttributeError:  # metadata that are no text have no checksum
        content = join(header, tensors)
    with pytest.raises(DamagedEntry, match=reason):
        decode(KEY, buffer(content))


def test_a_frame_of_another_size_is_damage():
    other = ChunkKV(
        torch.tensor([3, -4]), (torch.ones(1, 2, 3),), example().values, fingerprint="model-a", start=2
    )
    header, tensors = split(file_of(other, "raw+zstd"))
    header["__metadata__"]["plain"] = "F32 1,2,1;BF16 1,2,2"
    with pytest.raises(DamagedEntry, match=r"keys\.0: a part does not expand to the 8 bytes of its shape"):
        decode(KEY, buffer(sealed(header, tensors)))


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((1, 2**33, 64), None),  # a frame that honestly holds what it says would still be a bomb
        ((2**40, 2, 2**10), None),
        ((2**31, 0, 2**31), "scale"),  # no numbers, and yet a scale for each channel
    ],
)
def test_a_small_file_does_not_expand_without_bound(shape, part):
    """It is refused before memory is asked for: none of these would fit in any."""
    coding = "fp8+zstd" if part else "raw+zstd"
    tokens = 0 if part else 2
    empty = torch.zeros(1, tokens, 1)
    kv = ChunkKV(torch.arange(tokens), (empty,), (empty,), fingerprint="model-a", start=2)
    header, tensors = split(file_of(kv, coding))
    header["__metadata__"]["plain"] = f"F32 {','.join(map(str, shape))};F32 1,{tokens},1"
    with pytest.raises(DamagedEntry, match=r"^is damaged: [0-9]+ bytes claim to expand to [0-9]{12,}$"):
        decode(KEY, buffer(sealed(header, tensors)))


def test_what_readers_would_refuse_is_not_written(monkeypatch):
    keys = (torch.zeros(1, 512, 512),)
    kv = ChunkKV(torch.arange(512), keys, keys, fingerprint="m")
    assert decode(KEY, buffer(file_of(kv, "raw+zstd"))).keys[0].equal(keys[0])
    monkeypatch.setattr(format, "ALWAYS_BYTES", 2**20)
    with pytest.raises(StoreError, match="more than readers believe; use codec=raw"):
        file_of(kv, "raw+zstd")
    file_of(kv, "int8")


@pytest.mark.parametrize("codec", ["q3", "int8+lz4"])
def test_a_codec_that_is_not_installed_is_no_damage(codec):
    header, tensors = split(file_of(example(), "int8"))
    header["__metadata__"]["codec"] = codec
    with pytest.raises(UnreadableEntry, match=r"cannot be read here: .*codec"):
        decode(KEY, buffer(sealed(header, tensors)))
    with pytest.raises(DamagedEntry, match="checksum"):
        decode(
            KEY, buffer(join({**header, "__metadata__": {**header["__metadata__"], "codec": "q4"}}, tensors))
        )


def test_numbers_that_the_codec_cannot_hold_are_refused():
    keys = (torch.tensor([[[torch.inf]]]),)
    kv = ChunkKV(torch.tensor([1]), keys, keys, fingerprint="m")
    with pytest.raises(StoreError, match=r"keys\.0 holds infinities.*which the codec int8 cannot hold; use"):
        file_of(kv, "int8")


def test_a_store_reads_what_every_codec_wrote(tmp_path, make_chunk, make_key):
    for number, coding in enumerate(CODINGS):
        store = DiskStore(tmp_path, packing=Packing.of(codec=coding))
        store.put(make_key(number), make_chunk(1.0, tokens=9, dtype=torch.bfloat16))
        head = store.describe(make_key(number))
        assert head is not None
        assert (head.codec, head.num_tokens) == (coding, 9)
    store = open_store(f"disk:{tmp_path}?codec=int8+zstd")
    for number in range(len(CODINGS)):
        kv = store.get(make_key(number))
        assert kv is not None
        assert {t.dtype for t in (*kv.keys, *kv.values)} == {torch.bfloat16}
        torch.testing.assert_close(kv.keys[1].float(), torch.full((2, 9, 4), 2.0), rtol=0.07, atol=0)
    assert store.verify() == []


def test_a_damaged_coded_entry_is_set_aside_and_an_unknown_codec_left(tmp_path, make_chunk, make_key):
    store = DiskStore(tmp_path, packing=Packing.of(codec="int8"))
    for number in range(2):
        store.put(make_key(number), make_chunk())
    damaged, foreign = (tmp_path / k[:2] / f"{k}.safetensors" for k in map(make_key, range(2)))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    header, tensors = split(foreign.read_bytes())
    header["__metadata__"]["codec"] = "q3"
    foreign.write_bytes(sealed(header, tensors))
    assert store.get(make_key(0)) is store.get(make_key(1)) is None
    assert [rejection.set_aside for rejection in store.rejections] == [True, False]
    assert not damaged.exists()
    assert foreign.exists()


def test_a_store_of_an_unknown_codec_is_not_opened(tmp_path):
    with pytest.raises(MethodError, match="unknown codec 'int9'"):
        open_store(f"disk:{tmp_path / 'new'}?codec=int9")
    assert not (tmp_path / "new").exists()
