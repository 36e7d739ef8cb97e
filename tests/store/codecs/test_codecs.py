"""Every registered codec, on shapes, dtypes and numbers of all sizes."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvloom.store.codecs
from kvloom.errors import MethodError
from kvloom.store.codecs import Codec, Coding, NotCodable, Spec, codecs
from kvloom.store.codecs.base import round_up
from kvloom.store.codecs.grid import Grid
from kvloom.store.codecs.int4 import pack, unpack

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NAMES = sorted(codecs)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@st.composite
def tensors(draw):
    """(H, T, D) of any dtype: channels of very different sizes and middles, some constant, some empty."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(1, 3)), draw(st.integers(0, 140)), draw(st.integers(0, 70))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    # 2.0**-140 and below are subnormal in float32 and bfloat16.
    largest = 14 if dtype == torch.float16 else 124
    size = 2.0 ** torch.randint(-149, largest, (shape[0], 1, shape[2]), generator=rng).double()
    middle = size * torch.randint(-3, 4, size.shape, generator=rng) * draw(st.sampled_from([0, 1, 1 / 3]))
    spread = size * draw(st.sampled_from([0.0, 1e-6, 0.5, 1.0]))
    numbers = middle + spread * torch.randn(shape, generator=rng).double().clamp(-4, 4)
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype)


def spec_of(tensor):
    return Spec(tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(tensor=tensors())
@example(
    tensor=torch.full((1, 1, 1), 2.0**-134 + 2.0**-160, dtype=torch.float64)
)  # half a bfloat16, and more
def test_no_number_is_farther_off_than_the_bound(name, kind, tensor):
    codec = codecs.build(name)
    parts = codec.encode(kind, tensor)
    assert {part: spec_of(made) for part, made in parts.items()} == codec.parts(kind, spec_of(tensor))
    got = codec.decode(kind, parts, spec_of(tensor))
    assert spec_of(got) == spec_of(tensor)
    assert got.isfinite().all()
    error, bound = (got.double() - tensor.double()).abs(), codec.bound(kind, tensor)
    assert bound.shape == error.shape
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_bound_is_not_idle(name, kind):
    """A bound ten times too large would pass the test above."""
    rng = torch.Generator().manual_seed(0)
    tensor = torch.randn(2, 128, 64, generator=rng)
    codec = codecs.build(name)
    got = codec.decode(kind, codec.encode(kind, tensor), spec_of(tensor))
    error, bound = (got.double() - tensor.double()).abs(), codec.bound(kind, tensor)
    if name == "raw":
        assert not bound.any()
    else:
        assert 0.9 <= float((error / bound).max()) <= 1


@pytest.mark.parametrize(
    ("name", "factor"), [("raw", 1), ("bf16", 2), ("fp8", 3.9), ("int8", 3.7), ("int4", 6.3)]
)
def test_bytes(name, factor):
    plain = Spec(torch.float32, (3, 128, 64))
    for kind in ("keys", "values"):
        num_bytes = sum(spec.num_bytes for spec in codecs.build(name).parts(kind, plain).values())
        assert plain.num_bytes / num_bytes == pytest.approx(factor, abs=0.15)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"raw"}))
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_refused(name, kind, wrong):
    tensor = torch.ones(2, 5, 4)
    tensor[1, 2, 3] = wrong
    with pytest.raises(NotCodable, match="holds infinities, NaN"):
        codecs.build(name).encode(kind, tensor)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"raw"}))
def test_float64_beyond_the_range_of_float32_is_refused(name):
    with pytest.raises(NotCodable):
        codecs.build(name).encode("keys", torch.full((1, 2, 2), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_are_not_contiguous_are_coded_alike(name):
    tensor = torch.randn(3, 7, 6)
    strided = tensor.transpose(0, 2).contiguous().transpose(0, 2)
    codec = codecs.build(name)
    ours, theirs = codec.encode("keys", strided), codec.encode("keys", tensor)
    assert all(torch.equal(ours[part].float(), theirs[part].float()) for part in theirs)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_leaves_the_tensor_as_it_was(name):
    tensor = torch.randn(2, 70, 5)
    before = tensor.clone()
    codec = codecs.build(name)
    parts = codec.encode("values", tensor)
    kept = {part: made.clone() for part, made in parts.items()}
    codec.decode("values", parts, spec_of(tensor))
    assert torch.equal(tensor, before)
    assert all(torch.equal(parts[part].float(), kept[part].float()) for part in kept)


def test_bfloat16_is_exact_in_bf16():
    bits = torch.tensor([0x7FC1, 0x7F81, -1, -128, 1, 0], dtype=torch.int16).view(1, 2, 3)
    codec, tensor = codecs.build("bf16"), bits.view(torch.bfloat16)
    got = codec.decode("keys", codec.encode("keys", tensor), spec_of(tensor))
    assert got.view(torch.int16).tolist() == bits.tolist()


def test_the_largest_numbers_stay_finite():
    for dtype in DTYPES[:3]:
        tensor = torch.tensor([0.999, -0.25, 0.5, 1.0]).view(1, 2, 2).to(dtype) * torch.finfo(dtype).max
        for name in ("bf16", "fp8"):
            codec = codecs.build(name)
            got = codec.decode("keys", codec.encode("keys", tensor), spec_of(tensor))
            assert got.isfinite().all()
            assert ((got.double() - tensor.double()).abs() <= codec.bound("keys", tensor)).all()


def test_a_group_by_hand():
    """0 .. 15 is the grid itself: a step of 1 around 7.5; the second group is shorter."""
    tensor = torch.arange(20.0).view(1, 20, 1)
    codes, step, middle = Grid(16, 16, dim=1).encode(tensor)
    assert (step[0, 0, 0].item(), middle[0, 0, 0].item()) == (1.0, 7.5)
    assert codes[0, :16, 0].tolist() == list(range(16))
    assert middle[0, 1, 0].item() == 17.5
    assert step[0, 1, 0].item() == pytest.approx(0.2, rel=2**-7)
    assert step[0, 1, 0].item() >= 0.2
    assert codes[0, 16:, 0].tolist() == [0, 5, 10, 15]
    got = Grid(16, 16, dim=1).decode(codes, step, middle, torch.float32)
    assert got[0, :16, 0].tolist() == list(range(16))


def test_keys_are_grouped_along_tokens_and_values_along_channels():
    """One huge channel spoils its own keys alone, one huge token its own values alone."""
    for name in ("int8", "int4"):
        codec = codecs.build(name)
        keys = torch.randn(1, 32, 64)
        values = keys.clone()
        keys[:, :, 5] *= 1e6
        values[:, 5] *= 1e6
        for kind, tensor, spared in (("keys", keys, keys[:, :, 6:]), ("values", values, values[:, 6:])):
            got = codec.decode(kind, codec.encode(kind, tensor), spec_of(tensor))
            rest = got[:, :, 6:] if kind == "keys" else got[:, 6:]
            assert (rest - spared).abs().max() < 0.5


@given(st.lists(st.integers(0, 15), max_size=9))
def test_packing_two_codes_to_a_byte(codes):
    packed = pack(torch.tensor(codes, dtype=torch.uint8))
    assert len(packed) == (len(codes) + 1) // 2
    assert unpack(packed, len(codes)).tolist() == codes


def test_the_first_code_lies_in_the_low_half():
    assert pack(torch.tensor([[1, 2], [3, 0]], dtype=torch.uint8)).tolist() == [0x21, 0x03]


@given(st.floats(0, 2.0**127, width=32))
def test_round_up(number):
    rounded = round_up(torch.tensor([number]))
    assert rounded.dtype == torch.bfloat16
    assert rounded.item() >= number
    below = torch.nextafter(rounded, torch.zeros_like(rounded)).item()
    assert below < number or number == 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(tensor=tensors())
def test_zstd_changes_nothing(name, tensor):
    pytest.importorskip("zstandard")
    plain, squeezed = Coding.parse(name), Coding.parse(f"{name}+zstd")
    for kind in ("keys", "values"):
        parts = squeezed.encode(kind, tensor)
        assert all(part.dtype == torch.uint8 and part.ndim == 1 for part in parts.values())
        got = squeezed.decode(kind, parts, spec_of(tensor))
        expected = plain.decode(kind, plain.encode(kind, tensor), spec_of(tensor))
        bits = BITS[tensor.element_size()]
        assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


def test_zstd_gains_on_what_is_regular():
    pytest.importorskip("zstandard")
    tensor = torch.randn(2, 64, 32).bfloat16()
    parts = Coding.parse("raw+zstd").encode("keys", tensor)
    assert parts["codes"].nbytes < 0.9 * tensor.nbytes


@pytest.mark.parametrize("wrong", ["longer", "shorter", "noise", "cut"])
def test_a_frame_that_is_not_the_part_is_refused(wrong):
    zstandard = pytest.importorskip("zstandard")
    coding, spec = Coding.parse("raw+zstd"), Spec(torch.float32, (1, 2, 3))
    content = {
        "longer": zstandard.compress(bytes(25)),
        "shorter": zstandard.compress(bytes(23)),
        "noise": b"no frame at all",
        "cut": zstandard.compress(bytes(range(24)))[:-2],
    }[wrong]
    with pytest.raises(ValueError, match=r"a part (is no zstd frame|does not expand to the 24 bytes)"):
        coding.decode("keys", {"codes": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "unknown codec 'int9'; did you mean 'int"),
        ("", "unknown codec ''; there are: bf16, fp8, int4, int8, raw"),
        ("int8+gzip", "only zstd can follow a codec; write 'int8[+]zstd'"),
        ("int8+", "only zstd can follow a codec"),
        ("zstd", "names no codec to follow; write 'raw[+]zstd'"),
        ("int8+zstd+zstd", "only zstd can follow a codec"),
    ],
)
def test_codecs_that_are_none(text, message):
    with pytest.raises(MethodError, match=message):
        Coding.parse(text)


def test_zstd_without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(MethodError, match=r"pip install 'kvloom\[zstd\]'"):
        Coding.parse("int8+zstd")
    assert str(Coding.parse("int8")) == "int8"


def test_one_registration_per_file():
    for module in pkgutil.iter_modules(kvloom.store.codecs.__path__):
        loaded = importlib.import_module(f"kvloom.store.codecs.{module.name}")
        own = [
            value
            for value in vars(loaded).values()
            if isinstance(value, type) and issubclass(value, Codec) and value.__module__ == loaded.__name__
        ]
        if module.name != "base":
            assert [codec.name for codec in own] in ([module.name], [])
