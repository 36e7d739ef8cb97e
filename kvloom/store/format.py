"""The tensors of one chunk: as they are (format version 1) or as a codec made them (version 2).

Described in docs/format.md. The file around them is in `kvloom.store.container`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from kvloom.errors import MethodError, StoreError
from kvloom.kv import ChunkKV
from kvloom.store.base import EntryHead
from kvloom.store.codecs import RAW, Coding, Kind, NotCodable, Spec
from kvloom.store.container import (
    CODED,
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    FORMAT,
    MAX_HEADER_BYTES,
    PLAIN,
    DamagedEntry,
    Extent,
    NewerFormat,
    UnreadableEntry,
    check_contents,
    check_cover,
    decimal,
    fits,
    read_extent,
    read_extents,
    read_header,
    require,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from kvloom.store.container import Header

MAX_EXPANSION = 100  # times a coded file's own size; int4 of float64 with zstd behind it comes to some 20
ALWAYS_BYTES = 64 * 2**20  # what any file may expand to

_PLAIN_SPEC = re.compile(f"({'|'.join(FLOATS)}) ((?:0|[1-9][0-9]{{0,17}})(?:,(?:0|[1-9][0-9]{{0,17}})){{2}})")


def encode(key: str, kv: ChunkKV, coding: Coding = RAW) -> list[bytes | memoryview]:
    """The file's bytes in order, in pieces that share the memory of tensors contiguous on the CPU.

    The same key, chunk and coding always give the same bytes. Raises ``StoreError`` for a dtype it cannot
    hold, and for numbers that the codec cannot hold.
    """
    names = _tensor_names(kv.num_layers, has_rows=kv.rows is not None)
    tensors = dict(zip(names, (kv.token_ids, *kv.keys, *kv.values, *(kv.rows or ())), strict=True))
    for name, tensor in tensors.items():
        if not fits(name, DTYPE_NAMES.get(tensor.dtype), PLAIN):
            known = ", ".join(str(DTYPES[dtype]) for dtype in FLOATS)
            raise StoreError(f"{name} is {tensor.dtype}, which a chunk file cannot hold; use one of {known}")
    metadata = {
        "fingerprint": kv.fingerprint,
        "format": FORMAT,
        "key": key,
        "num_layers": str(kv.num_layers),
        "start": str(kv.start),
        "version": str(PLAIN),
    }
    if kv.compressor:
        metadata["compressor"] = kv.compressor
    if coding.is_plain:
        return write(metadata, tensors)
    coded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = _kind(name)
        coded |= {name: tensor} if kind is None else _encoded(name, kind, tensor, coding)
    plain = ";".join(_plain_text(tensor) for name, tensor in tensors.items() if _kind(name))
    metadata |= {"version": str(CODED), "codec": str(coding), "plain": plain}
    pieces = write(metadata, {name: coded[name] for name in sorted(coded)})
    specs = {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items() if _kind(name)}
    num_bytes, expanded = sum(map(len, pieces)), _expanded(specs, coding)
    if not _may_expand(num_bytes, expanded):
        raise StoreError(
            f"the codec {coding} shrinks {expanded:,} bytes to {num_bytes:,}, more than readers believe; "
            "use codec=raw, or mend the model"
        )
    return pieces


def _encoded(name: str, kind: Kind, tensor: Tensor, coding: Coding) -> Mapping[str, Tensor]:
    try:
        parts = coding.encode(kind, tensor)
    except NotCodable as error:
        raise StoreError(
            f"{name} {error}, which the codec {coding} cannot hold; use codec=raw, or mend the model"
        ) from None
    return {f"{name}.{part}": made for part, made in parts.items()}


def decode(key: str, content: memoryview, read: Header | None = None) -> ChunkKV:
    """The chunk whose file is `content` (writable bytes); its tensors share that memory where no codec made
    them. Who has `read` the header gives it, so that it is read once.

    Every byte has been checked: raises ``DamagedEntry``, or ``UnreadableEntry`` for a file that may be right
    but cannot be read here: of a later format version, encrypted, or of a codec that is not installed.
    """
    header, data_begin = read or read_header(content)
    metadata = header["__metadata__"]
    _check_key(metadata, key)
    if "cipher" in metadata:
        raise UnreadableEntry("is encrypted; give the store its key as key_file=FILE or $KVLOOM_STORE_KEY")
    start, num_layers = (decimal(metadata, name) for name in ("start", "num_layers"))
    is_plain = decimal(metadata, "version") == PLAIN
    take = _plain_tensors if is_plain else _coded_tensors
    tensors = take(header, num_layers, data_begin, content)
    keys, values, rows = (
        tuple(tensors[f"{kind}.{layer}"] for layer in range(num_layers) if f"{kind}.{layer}" in tensors)
        for kind in ("keys", "values", "rows")
    )
    try:
        return ChunkKV(
            tensors["token_ids"],
            keys,
            values,
            fingerprint=metadata["fingerprint"],
            start=start,
            rows=rows or None,
            compressor=metadata.get("compressor", ""),
        )
    except ValueError as error:
        raise DamagedEntry(f"is damaged: {error}") from None


def _plain_tensors(
    header: dict[str, Any], num_layers: int, data_begin: int, content: memoryview
) -> dict[str, Tensor]:
    # Counted before the names are built: a damaged number of layers must not ask for memory.
    num_tensors = len(header) - 1
    has_rows = num_layers > 0 and num_tensors == 3 * num_layers + 1
    require(
        has_rows or num_tensors == 2 * num_layers + 1,
        f"{num_layers} layers do not have {num_tensors} tensors",
    )
    names = _tensor_names(num_layers, has_rows=has_rows)
    require(set(header) == {"__metadata__", *names}, "its tensors are not the expected ones")
    by_name = read_extents(header, data_begin)
    extents = [by_name[name] for name in names]
    check_cover(extents, data_begin, len(content))
    check_contents(header["__metadata__"], extents, content)
    return {extent.name: extent.tensor(content) for extent in extents}


def _coded_tensors(
    header: dict[str, Any], num_layers: int, data_begin: int, content: memoryview
) -> dict[str, Tensor]:
    metadata = header["__metadata__"]
    extents = read_extents(header, data_begin)
    check_cover(extents.values(), data_begin, len(content))
    check_contents(metadata, [extents[name] for name in sorted(extents)], content)
    # From here on the file is what was written, so what does not fit is the writer's doing.
    require(0 < len(header) <= 1 + len(content), "it has more tensors than bytes")
    require(num_layers <= len(header), f"{num_layers} layers do not have {len(header) - 1} tensors")
    coding = _coding_of(metadata["codec"])
    names = [name for name in _tensor_names(num_layers, has_rows=False) if _kind(name)]
    specs = dict(zip(names, _plain_specs(metadata["plain"], len(names)), strict=True))
    expanded = _expanded(specs, coding)
    require(_may_expand(len(content), expanded), f"{len(content)} bytes claim to expand to {expanded}")
    others = _tensor_names(num_layers, has_rows="rows.0" in extents)
    expected: dict[str, Spec | None] = {name: None for name in others if _kind(name) is None}
    for name, kind, spec in _with_kinds(specs):
        expected |= {f"{name}.{part}": stored for part, stored in coding.stored(kind, spec).items()}
    require(set(expected) == set(extents), f"its tensors are not those of the codec {coding}")
    for name, spec in expected.items():
        if name not in others:
            _check_part(extents[name], spec)
    tensors = {name: extents[name].tensor(content) for name in others if _kind(name) is None}
    for name, kind, spec in _with_kinds(specs):
        parts = {part: extents[f"{name}.{part}"].tensor(content) for part in coding.stored(kind, spec)}
        try:
            tensors[name] = coding.decode(kind, parts, spec)
        except ValueError as error:
            raise DamagedEntry(f"is damaged: {name}: {error}") from None
    return tensors


def _expanded(specs: Mapping[str, Spec], coding: Coding) -> int:
    """Bytes of the tensors and of the parts that they are made from."""
    parts = [part for _, kind, spec in _with_kinds(specs) for part in coding.codec.parts(kind, spec).values()]
    return sum(spec.num_bytes for spec in (*specs.values(), *parts))


def _may_expand(num_bytes: int, expanded: int) -> bool:
    """False for a file that would take memory far beyond its size, as no keys and values do."""
    return expanded <= max(MAX_EXPANSION * num_bytes, ALWAYS_BYTES)


def _check_part(extent: Extent, spec: Spec | None) -> None:
    """Raises ``DamagedEntry`` unless the part is as the codec says; None: a list of bytes."""
    found, dtype = extent.shape, DTYPES[extent.dtype]
    if spec is None:
        require(extent.dtype == "U8" and len(found) == 1, f"{extent.name} is not a list of bytes")
    else:
        is_right = (dtype, found) == (spec.dtype, spec.shape)
        require(is_right, f"{extent.name} is {dtype} {found}, its codec makes {spec.dtype} {spec.shape}")


def _coding_of(text: str) -> Coding:
    try:
        return Coding.parse(text)
    except MethodError as error:
        raise UnreadableEntry(f"cannot be read here: {error}") from None


def _plain_text(tensor: Tensor) -> str:
    return f"{DTYPE_NAMES[tensor.dtype]} {','.join(map(str, tensor.shape))}"


def _plain_specs(text: str, count: int) -> list[Spec]:
    matches = [_PLAIN_SPEC.fullmatch(item) for item in text.split(";")] if text else []
    require(len(matches) == count and all(matches), "its dtypes and shapes are not those of its layers")
    return [Spec(DTYPES[m[1]], tuple(map(int, m[2].split(",")))) for m in matches if m]


def decode_head(key: str, head: memoryview, num_bytes: int) -> EntryHead:
    """What the file of `num_bytes` says of itself, from its first bytes up to the end of its header.

    The tensors are not looked at, but the file must be as long as they say. Raises as `decode` does.
    """
    header, data_begin = read_header(head)
    ends = [extent.end for extent in read_extents(header, data_begin).values()]
    require(
        max(ends, default=data_begin) == num_bytes, f"is {num_bytes} bytes long, its header says otherwise"
    )
    metadata = header["__metadata__"]
    _check_key(metadata, key)
    if "cipher" in metadata:
        num_tokens = decimal(metadata, "num_tokens")
    else:
        version = decimal(metadata, "version")
        num_tokens = math.prod(read_extent("token_ids", header.get("token_ids"), 0, version).shape)
    return EntryHead(
        key=key,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        fingerprint=metadata["fingerprint"],
        start=decimal(metadata, "start"),
        codec=metadata.get("codec", "raw"),
        is_encrypted="cipher" in metadata,
    )


def head_bytes(beginning: bytes, num_bytes: int) -> int:
    """How many bytes of a file of `num_bytes` its header takes, length included, from its first 8 bytes."""
    return min(8 + min(int.from_bytes(beginning[:8], "little"), MAX_HEADER_BYTES), num_bytes)


def _check_key(metadata: Mapping[str, str], key: str) -> None:
    if metadata["key"] != key:
        raise DamagedEntry(f"holds the chunk of another key, {metadata['key']}")


def _tensor_names(num_layers: int, *, has_rows: bool) -> list[str]:
    """The names in canonical order; a chunk has rows where some were dropped."""
    kinds = ("keys", "values", "rows") if has_rows else ("keys", "values")
    return ["token_ids", *(f"{kind}.{layer}" for kind in kinds for layer in range(num_layers))]


def _kind(name: str) -> Kind | None:
    """What a codec takes the tensor for; None for token ids and rows, which no codec touches."""
    kind = name.partition(".")[0]
    return kind if kind in ("keys", "values") else None


def _with_kinds(specs: Mapping[str, Spec]) -> Iterator[tuple[str, Kind, Spec]]:
    for name, spec in specs.items():
        kind = _kind(name)
        assert kind is not None, f"{name} is no codec's"
        yield name, kind, spec


__all__ = [
    "DamagedEntry",
    "NewerFormat",
    "UnreadableEntry",
    "decode",
    "decode_head",
    "encode",
    "head_bytes",
]
