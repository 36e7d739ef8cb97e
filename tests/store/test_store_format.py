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

from kvloom.errors import StoreError
from kvloom.kv import ChunkKV
from kvloom.store import chunk_key
from kvloom.store.format import DamagedEntry, NewerFormat, decode, encode

KEY = chunk_key("model-a", torch.tensor([1, 2]), torch.tensor([3, -4]))
WORD = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def buffer(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


def file_of(kv: ChunkKV) -> bytes:
    return b"".join(encode(KEY, kv))


def example() -> ChunkKV:
    """The one of docs/format.md."""
    keys = torch.tensor([[[1.0], [2.0]]])
    values = torch.tensor([[[0.5, -0.5], [0.25, 0.0]]]).bfloat16()
    return ChunkKV(torch.tensor([3, -4]), (keys,), (values,), fingerprint="model-a", start=2)


def split(content: bytes) -> tuple[dict, bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict | str, tensors: bytes) -> bytes:
    text = (
        header if isinstance(header, str) else json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    )
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def checksum_by_the_document(content: bytes) -> str:
    """Written from docs/format.md alone, to hold the document to its word."""
    header, tensors = split(content)
    metadata = header.pop("__metadata__")
    parts = []
    for name in sorted(set(metadata) - {"checksum"}):
        parts += [name.encode(), metadata[name].encode()]
    layers = range(int(metadata["num_layers"]))
    kinds = ("keys", "values", "rows") if "rows.0" in header else ("keys", "values")
    for name in ["token_ids", *(f"{kind}.{i}" for kind in kinds for i in layers)]:
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
    tokens = draw(st.integers(0, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def tensor():
        shape = (draw(st.integers(1, 3)), tokens, draw(st.integers(0, 5)))
        word = WORD[dtype := draw(st.sampled_from(list(WORD)))]
        limits = torch.iinfo(word)
        # Random words rather than random numbers: infinities, denormals and NaN payloads are among them.
        bits = torch.randint(limits.min, limits.max, shape, dtype=word, generator=rng)
        return (
            bits.view(dtype).transpose(0, 2).contiguous().transpose(0, 2)
            if draw(st.booleans())
            else bits.view(dtype)
        )

    layers = draw(st.integers(0, 12))
    ids = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=rng)
    fingerprint = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
    keys, values = (tuple(tensor() for _ in range(layers)) for _ in range(2))
    return ChunkKV(ids, keys, values, fingerprint=fingerprint, start=draw(st.integers(0, 10**9)))


@st.composite
def compressed_chunks(draw):
    """Chunks of which a compressor dropped rows, in every layer and head others."""
    tokens, layers, heads = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    held = [draw(st.integers(0, tokens)) for _ in range(layers)]
    rows = tuple(
        torch.stack([torch.randperm(tokens, generator=rng)[:n].sort().values for _ in range(heads)]).int()
        for n in held
    )
    keys, values = (tuple(torch.randn(heads, n, 2, generator=rng).to(dtype) for n in held) for _ in range(2))
    ids = torch.arange(tokens)
    return ChunkKV(ids, keys, values, fingerprint="m", start=3, rows=rows, compressor="Knorm(keep=0.5)")


@settings(max_examples=50, deadline=None)
@given(st.one_of(chunks(), compressed_chunks()))
def test_round_trip_is_bit_exact(assert_same, kv):
    content = file_of(kv)
    assert_same(decode(KEY, buffer(content)), kv)
    assert split(content)[0]["__metadata__"]["checksum"] == checksum_by_the_document(content)


def test_rows_that_no_compressor_leaves_are_damage():
    rows = (torch.tensor([[0, 2]], dtype=torch.int32),)
    keys = (torch.zeros(1, 2, 1),)
    content = file_of(ChunkKV(torch.arange(3), keys, keys, fingerprint="m", rows=rows, compressor="Knorm()"))
    header, tensors = split(content)
    begin, _ = header["rows.0"]["data_offsets"]
    for wrong in ([2, 0], [0, 3], [1, 1], [-1, 2]):
        changed = tensors[:begin] + struct.pack("<2i", *wrong) + tensors[begin + 8 :]
        with pytest.raises(DamagedEntry, match="rows must ascend"):
            decode(KEY, buffer(sealed(dict(header), changed)))


@settings(max_examples=50, deadline=None)
@given(chunks())
def test_the_safetensors_library_reads_the_same(kv):
    loaded = safetensors.torch.load(file_of(kv))
    assert set(loaded) == {"token_ids"} | {
        f"{k}.{i}" for k in ("keys", "values") for i in range(kv.num_layers)
    }
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        for ours, theirs in ((keys, loaded[f"keys.{layer}"]), (values, loaded[f"values.{layer}"])):
            word = WORD[ours.dtype]
            assert torch.equal(ours.contiguous().view(word), theirs.view(word))


def test_nan_payloads_survive(assert_same):
    bits = torch.tensor([0x7FC0, 0x7FC1, 0x7F81, -1, -128, -32768], dtype=torch.int16).view(1, 2, 3)
    for dtype in (torch.bfloat16, torch.float16):
        kv = ChunkKV(torch.arange(2), (bits.view(dtype),), (bits.view(dtype),), fingerprint="m")
        assert decode(KEY, buffer(file_of(kv))).keys[0].view(torch.int16).tolist() == bits.tolist()


def test_the_metadata_are_readable_by_the_library(tmp_path):
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(file_of(example()))
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    checksum = metadata.pop("checksum")
    assert metadata == {
        "format": "kvloom-chunk",
        "version": "1",
        "key": KEY,
        "fingerprint": "model-a",
        "start": "2",
        "num_layers": "1",
    }
    assert checksum == "xxh3_128:61926ea0778a7f8c9eb28c5325ff124a"
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    assert checksum in document
    assert KEY in document


@settings(max_examples=50, deadline=None)
@given(chunks())
def test_the_document_gives_the_checksum(kv):
    content = file_of(kv)
    assert split(content)[0]["__metadata__"]["checksum"] == checksum_by_the_document(content)


def test_tensors_are_aligned_views_of_the_one_buffer():
    odd = torch.ones(1, 3, 1)
    kv = ChunkKV(torch.arange(3), (odd.half(), odd), (odd.bfloat16(), odd.double()), fingerprint="m")
    content = buffer(file_of(kv))
    begin = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    got = decode(KEY, content)
    for tensor in (got.token_ids, *got.keys, *got.values):
        assert begin <= tensor.data_ptr() <= begin + len(content) - tensor.nbytes
        assert (tensor.data_ptr() - begin) % tensor.element_size() == 0


def test_writing_copies_no_tensor():
    kv = example()
    pieces = encode(KEY, kv)
    kv.keys[0].fill_(9)
    assert b"".join(pieces) != file_of(example())
    assert len(pieces) == 4


def test_any_changed_byte_is_found():
    content = file_of(example())
    spared = {content.index(b'"version":"1') + len('"version":"')}  # "3" would be a later version
    rng = random.Random(0)
    for offset in range(len(content)):
        # 0x2A and 0x29 turn the padding into other white space, 0x20 changes the case of letters.
        for mask in {1, 2, 0x20, 0x2A, 0x29, 0x80, 0xFF, rng.randrange(1, 256)}:
            changed = bytearray(content)
            changed[offset] ^= mask
            faults = (DamagedEntry, NewerFormat) if offset in spared else DamagedEntry
            with pytest.raises(
                faults, match=r"^(is damaged: .|holds the chunk of another key|has format version)"
            ):
                decode(KEY, memoryview(changed))


def test_any_truncation_is_found():
    content = file_of(example())
    for length in range(len(content)):
        with pytest.raises(DamagedEntry, match="is damaged"):
            decode(KEY, buffer(content[:length]))
    with pytest.raises(DamagedEntry, match="its tensors end at 472, the file at 473"):
        decode(KEY, buffer(content + b"\0"))


def test_another_key_is_refused():
    with pytest.raises(DamagedEntry, match=f"holds the chunk of another key, {KEY}"):
        decode("0" * 64, buffer(file_of(example())))


@pytest.mark.parametrize("version", ["3", "17"])
def test_a_later_version_is_told_apart(version):
    header, tensors = split(file_of(example()))
    header["__metadata__"] |= {"version": version, "codec": ["q4"]}
    header["extra"] = header.pop("keys.0")
    text = json.dumps(header, indent=1)  # nor need it keep to the canonical form
    with pytest.raises(NewerFormat, match=f"has format version {version}, beyond 2"):
        decode(KEY, buffer(join(text, tensors)))


@pytest.mark.parametrize("version", ["0", "01", "-2", "1.0", "", "x", "9" * 19, "²"])
def test_what_is_no_version_is_damage(version):
    header, tensors = split(file_of(example()))
    header["__metadata__"]["version"] = version
    with pytest.raises(DamagedEntry, match="version"):
        decode(KEY, buffer(join(header, tensors)))


def test_the_seal_of_these_tests_is_right(assert_same):
    assert_same(decode(KEY, buffer(sealed(*split(file_of(example()))))), example())


def test_the_order_of_entries_is_free(assert_same):
    header, tensors = split(file_of(example()))
    assert_same(decode(KEY, buffer(join(dict(reversed(header.items())), tensors))), example())


AFTER_CHECKSUM = [
    r"layer 0: keys \(2, 1, 1\) should be \(heads, 2, head_dim\)",
    r"layer 0: keys \(2,\) should be",
    "token_ids must be one-dimensional",
]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("keys.0", {"data_offsets": [8, 16]}, "begins at"),
        ("values.0", {"data_offsets": [16, 24]}, "begins at"),
        ("values.0", {"shape": [1, 2, 1], "data_offsets": [24, 28]}, "its tensors end at"),
        ("values.0", {"shape": [1, 2, 4], "data_offsets": [24, 40]}, "its tensors end at"),
        ("keys.0", {"data_offsets": [24, 16]}, "keys.0 has -8 bytes, its shape needs 8"),
        ("keys.0", {"shape": [1, 2, 2]}, "keys.0 has 8 bytes, its shape needs 16"),
        ("keys.0", {"shape": [-1, -2, 1]}, r"keys.0 has the shape \[-1, -2, 1\]"),
        ("keys.0", {"shape": [True, 2, 1]}, "keys.0 has the shape"),
        ("keys.0", {"shape": [1.0, 2, 1]}, "keys.0 has the shape"),
        ("keys.0", {"shape": "121"}, "keys.0 has the shape"),
        ("keys.0", {"shape": [2, 1, 1]}, AFTER_CHECKSUM[0]),
        ("keys.0", {"shape": [2]}, AFTER_CHECKSUM[1]),
        ("token_ids", {"shape": [2, 1]}, AFTER_CHECKSUM[2]),
        ("keys.0", {"data_offsets": [16, 24, 24]}, "keys.0 has the offsets"),
        ("keys.0", {"data_offsets": None}, "keys.0 has the offsets"),
        ("keys.0", {"dtype": "F8_E4M3"}, "keys.0 has the dtype F8_E4M3"),
        ("keys.0", {"dtype": "I64", "shape": [1, 1, 1]}, "keys.0 has the dtype I64"),
        ("token_ids", {"dtype": "F64"}, "token_ids has the dtype F64"),
        ("keys.0", {"dtype": ["F32"]}, "keys.0 has the dtype"),
        ("keys.0", {"note": "x"}, "keys.0 is not described by dtype, shape and data_offsets"),
        ("__metadata__", {"num_layers": "2"}, "2 layers do not have 3 tensors"),
        ("__metadata__", {"num_layers": "999999999999999999"}, "layers do not have 3 tensors"),
        ("__metadata__", {"num_layers": "01"}, "its num_layers '01' is not a number"),
        ("__metadata__", {"start": "-1"}, "its start '-1' is not a number"),
        ("__metadata__", {"format": "pt"}, "its format is not kvloom-chunk"),
        ("__metadata__", {"note": "x"}, "its metadata are not the expected ones"),
        ("__metadata__", {"fingerprint": 1}, "its metadata are not all text"),
        ("__metadata__", {"fingerprint": "model-b"}, "its checksum is not that of its contents"),
    ],
)
def test_a_header_that_lies_is_found(name, change, reason):
    header, tensors = split(file_of(example()))
    header[name] |= change
    # The checksum is looked at last, so it must be right only where no earlier check may find the lie.
    content = sealed(header, tensors) if reason in AFTER_CHECKSUM else join(header, tensors)
    with pytest.raises(DamagedEntry, match=reason):
        decode(KEY, buffer(content))


def test_misaligned_tensors_are_found():
    header, tensors = split(file_of(example()))
    header["values.0"] |= {"shape": [1, 2, 1], "data_offsets": [0, 4]}
    header["token_ids"]["data_offsets"] = [4, 20]
    header["keys.0"]["data_offsets"] = [20, 28]
    with pytest.raises(DamagedEntry, match="token_ids does not lie on a multiple of 8 bytes"):
        decode(KEY, buffer(join(header, tensors[:28])))


@pytest.mark.parametrize(
    ("swap", "reason"),
    [
        (("keys.0", "keys.1"), "its tensors are not the expected ones"),
        (("keys.0", "values.00"), "its tensors are not the expected ones"),
        (("__metadata__", "metadata"), "its format is not"),
    ],
)
def test_a_tensor_under_another_name_is_found(swap, reason):
    header, tensors = split(file_of(example()))
    header[swap[1]] = header.pop(swap[0])
    with pytest.raises(DamagedEntry, match=reason):
        decode(KEY, buffer(join(header, tensors)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "its header is not a JSON object"),
        ("{}", "its format is not kvloom-chunk"),
        ('{"__metadata__":[]}', "its format is not kvloom-chunk"),
        ("[" * 100_000, "its header is not JSON"),
        ("9" * 10_000, "its header is not JSON"),
        ("", "its header is not JSON"),
    ],
)
def test_a_header_that_is_none_is_found(text, reason):
    with pytest.raises(DamagedEntry, match=reason):
        decode(KEY, buffer(join(text, b"")))


def test_a_name_given_twice_is_found():
    header, tensors = split(file_of(example()))
    text = json.dumps(header, separators=(",", ":"))
    with pytest.raises(DamagedEntry, match="its header is not in the canonical form"):
        decode(KEY, buffer(join('{"token_ids":0,' + text[1:], tensors)))


def test_a_length_beyond_the_file_is_found():
    for length in (2**64 - 1, 2**63, 2**40, 465):
        with pytest.raises(DamagedEntry, match=f"its header of {length} bytes does not fit in 464"):
            decode(KEY, buffer(struct.pack("<Q", length) + file_of(example())[8:]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_without_a_place_in_the_format_is_refused(dtype):
    kv = ChunkKV(
        torch.arange(2), (torch.zeros(1, 2, 1, dtype=dtype),), (torch.zeros(1, 2, 1),), fingerprint="m"
    )
    with pytest.raises(
        StoreError, match=f"keys.0 is {dtype}, which a chunk file cannot hold; use one of torch.float64"
    ):
        encode(KEY, kv)
