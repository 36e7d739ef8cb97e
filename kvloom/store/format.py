"""The bytes of one chunk: a safetensors file with a checksum, described in docs/format.md.

The header is written and read here rather than by the safetensors library: its writer either copies all
tensors or hides the cause of a failed write, and its reader maps the file, so that a file cut short under us
would kill the process.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from kvloom.errors import StoreError
from kvloom.kv import ChunkKV
from kvloom.store.base import FORMAT_VERSION, EntryHead, fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

FORMAT = "kvloom-chunk"
ALIGNMENT = 8  # of the tensors' first byte, so that every tensor lies on a multiple of its element size
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = {"format", "version", "key", "fingerprint", "start", "num_layers", "checksum"}
_INTEGERS = {"token_ids": "I64", "rows": "I32"}  # all other tensors hold floating point
_DECIMAL = re.compile("0|[1-9][0-9]{0,17}")


class DamagedEntry(Exception):
    """The bytes are not what was written; the message completes "the entry ..."."""


class NewerFormat(Exception):
    """The bytes are of a later format version; the message completes "the entry ..."."""


@dataclass(frozen=True)
class _Extent:
    """Where one tensor lies: bytes ``begin .. end - 1`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode(key: str, kv: ChunkKV) -> list[bytes | memoryview]:
    """The file's bytes in order, in pieces that share the memory of tensors contiguous on the CPU.

    The same key and chunk always give the same bytes. Raises ``StoreError`` for a dtype it cannot hold.
    """
    names = _tensor_names(kv.num_layers, has_rows=kv.rows is not None)
    tensors = dict(zip(names, (kv.token_ids, *kv.keys, *kv.values, *(kv.rows or ())), strict=True))
    for name, tensor in tensors.items():
        if not _fits(name, _DTYPE_NAMES.get(tensor.dtype)):
            known = ", ".join(str(dtype) for dtype in _DTYPE_NAMES if dtype.is_floating_point)
            raise StoreError(f"{name} is {tensor.dtype}, which a chunk file cannot hold; use one of {known}")
    contents = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    # Widest elements first: with no gaps between tensors, this is what keeps each of them aligned.
    file_order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    extents: dict[str, _Extent] = {}
    end = 0
    for name in file_order:
        begin, end = end, end + len(contents[name])
        dtype = _DTYPE_NAMES[tensors[name].dtype]
        extents[name] = _Extent(name, dtype, tuple(tensors[name].shape), begin, end)
    metadata = {
        "fingerprint": kv.fingerprint,
        "format": FORMAT,
        "key": key,
        "num_layers": str(kv.num_layers),
        "start": str(kv.start),
        "version": str(FORMAT_VERSION),
    }
    if kv.compressor:
        metadata["compressor"] = kv.compressor
    metadata["checksum"] = _checksum(metadata, [(extents[name], contents[name]) for name in tensors])
    header: dict[str, Any] = {"__metadata__": metadata}
    for name in file_order:
        extent = extents[name]
        header[name] = {
            "dtype": extent.dtype,
            "shape": list(extent.shape),
            "data_offsets": [extent.begin, extent.end],
        }
    text = _compact_json(header)
    text += b" " * (-len(text) % ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *(contents[name] for name in file_order)]


def decode(key: str, content: memoryview) -> ChunkKV:
    """The chunk whose file is `content` (writable bytes); its tensors share that memory.

    Every byte has been checked: raises ``DamagedEntry``, or ``NewerFormat`` for a later format version.
    """
    header, data_begin = _read_header(content)
    metadata = header["__metadata__"]
    if metadata["key"] != key:
        raise DamagedEntry(f"holds the chunk of another key, {metadata['key']}")
    start, num_layers = (_decimal(metadata, name) for name in ("start", "num_layers"))
    extents = _read_extents(header, num_layers, data_begin, len(content))
    checksum = _checksum(
        {name: value for name, value in metadata.items() if name != "checksum"},
        [(extent, content[extent.begin : extent.end]) for extent in extents],
    )
    _require(checksum == metadata["checksum"], "its checksum is not that of its contents")
    token_ids, *rest = (_tensor(content, extent) for extent in extents)
    keys, values, rows = (
        tuple(rest[first : first + num_layers]) for first in (0, num_layers, 2 * num_layers)
    )
    try:
        return ChunkKV(
            token_ids,
            keys,
            values,
            fingerprint=metadata["fingerprint"],
            start=start,
            rows=rows or None,
            compressor=metadata.get("compressor", ""),
        )
    except ValueError as error:
        raise DamagedEntry(f"is damaged: {error}") from None


def decode_head(key: str, head: memoryview, num_bytes: int) -> EntryHead:
    """What the file of `num_bytes` says of itself, from its first bytes up to the end of its header.

    The tensors are not looked at, but the file must be as long as they say. Raises as `decode` does.
    """
    header, data_begin = _read_header(head)
    ends = [
        _read_extent(name, entry, data_begin).end for name, entry in header.items() if name != "__metadata__"
    ]
    _require(
        max(ends, default=data_begin) == num_bytes, f"is {num_bytes} bytes long, its header says otherwise"
    )
    metadata = header["__metadata__"]
    if metadata["key"] != key:
        raise DamagedEntry(f"holds the chunk of another key, {metadata['key']}")
    extent = _read_extent("token_ids", header.get("token_ids"), 0)
    return EntryHead(
        key=key,
        num_tokens=math.prod(extent.shape),
        num_bytes=num_bytes,
        fingerprint=metadata["fingerprint"],
        start=_decimal(metadata, "start"),
    )


def head_bytes(beginning: bytes, num_bytes: int) -> int:
    """How many bytes of a file of `num_bytes` its header takes, length included, from its first 8 bytes."""
    return min(8 + min(int.from_bytes(beginning[:8], "little"), MAX_HEADER_BYTES), num_bytes)


def _read_header(content: memoryview) -> tuple[dict[str, Any], int]:
    """The header, its metadata complete and of this version, and where the tensors begin."""
    _require(len(content) >= 8, f"{len(content)} bytes are too few to be a chunk file")
    length = int.from_bytes(content[:8], "little")
    limit = min(len(content) - 8, MAX_HEADER_BYTES)
    _require(length <= limit, f"its header of {length} bytes does not fit in {limit}")
    text = bytes(content[8 : 8 + length])
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise DamagedEntry("is damaged: its header is not JSON") from None
    _require(isinstance(header, dict), "its header is not a JSON object")
    metadata = header.get("__metadata__")
    is_ours = isinstance(metadata, dict) and metadata.get("format") == FORMAT
    _require(is_ours, f"its format is not {FORMAT}")
    # Before anything else is asked of the file, since a later version may change all the rest.
    version = _decimal(metadata, "version")
    if version > FORMAT_VERSION:
        raise NewerFormat(f"has format version {version}, beyond {FORMAT_VERSION}; update kvloom to read it")
    _require(version == FORMAT_VERSION, f"there is no format version {version}")
    # One spelling only, else a flipped bit that turns one white space into another would pass unseen.
    canonical = _compact_json(header)
    canonical += b" " * (-len(canonical) % ALIGNMENT)
    _require(text == canonical, "its header is not in the canonical form")
    _require(set(metadata) - {"compressor"} == _METADATA, "its metadata are not the expected ones")
    _require(all(isinstance(v, str) for v in metadata.values()), "its metadata are not all text")
    return header, 8 + length


def _read_extents(header: dict[str, Any], num_layers: int, data_begin: int, file_end: int) -> list[_Extent]:
    """Where each tensor lies, in canonical order; they cover ``data_begin .. file_end - 1`` exactly once."""
    # Counted before the names are built: a damaged number of layers must not ask for memory.
    num_tensors = len(header) - 1
    has_rows = num_layers > 0 and num_tensors == 3 * num_layers + 1
    _require(
        has_rows or num_tensors == 2 * num_layers + 1,
        f"{num_layers} layers do not have {num_tensors} tensors",
    )
    names = _tensor_names(num_layers, has_rows=has_rows)
    _require(set(header) == {"__metadata__", *names}, "its tensors are not the expected ones")
    extents = [_read_extent(name, header[name], data_begin) for name in names]
    position = data_begin
    for extent in sorted(extents, key=lambda extent: (extent.begin, extent.end)):
        _require(extent.begin == position, f"{extent.name} begins at {extent.begin}, not {position}")
        position = extent.end
    _require(position == file_end, f"its tensors end at {position}, the file at {file_end}")
    return extents


def _read_extent(name: str, entry: Any, data_begin: int) -> _Extent:
    is_complete = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    _require(is_complete, f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    _require(isinstance(dtype, str) and _fits(name, dtype), f"{name} has the dtype {dtype}")
    _require(_are_counts(shape), f"{name} has the shape {shape}")
    _require(_are_counts(offsets) and len(offsets) == 2, f"{name} has the offsets {offsets}")
    item_bytes = _DTYPES[dtype].itemsize
    begin, end = (data_begin + offset for offset in offsets)
    _require(begin % item_bytes == 0, f"{name} does not lie on a multiple of {item_bytes} bytes")
    num_bytes = math.prod(shape) * item_bytes
    _require(end - begin == num_bytes, f"{name} has {end - begin} bytes, its shape needs {num_bytes}")
    return _Extent(name, dtype, tuple(shape), begin, end)


def _checksum(metadata: Mapping[str, str], tensors: Sequence[tuple[_Extent, memoryview]]) -> str:
    """The checksum over all metadata but itself, and over `tensors` in canonical order."""
    digest = xxhash.xxh3_128()
    pieces = [piece.encode() for name in sorted(metadata) for piece in (name, metadata[name])]
    for extent, content in tensors:
        shape = ",".join(str(size) for size in extent.shape)
        pieces += [extent.name.encode(), extent.dtype.encode(), shape.encode(), content]
    for field in fields(pieces):
        digest.update(field)
    return f"xxh3_128:{digest.hexdigest()}"


def _tensor_names(num_layers: int, *, has_rows: bool) -> list[str]:
    """The names in canonical order; a chunk has rows where some were dropped."""
    kinds = ("keys", "values", "rows") if has_rows else ("keys", "values")
    return ["token_ids", *(f"{kind}.{layer}" for kind in kinds for layer in range(num_layers))]


def _fits(name: str, dtype: str | None) -> bool:
    wanted = _INTEGERS.get(name.partition(".")[0])
    return dtype == wanted if wanted else dtype in _DTYPES and dtype not in _INTEGERS.values()


def _tensor(content: memoryview, extent: _Extent) -> Tensor:
    dtype = _DTYPES[extent.dtype]
    count = math.prod(extent.shape)
    if count == 0:  # torch.frombuffer refuses empty buffers
        return torch.empty(extent.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=extent.begin).view(extent.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _compact_json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def _decimal(metadata: Mapping[str, Any], name: str) -> int:
    text = metadata.get(name)
    is_number = isinstance(text, str) and _DECIMAL.fullmatch(text) is not None
    _require(is_number, f"its {name} {text!r} is not a number")
    return int(str(text))


def _are_counts(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise DamagedEntry(f"is damaged: {fault}")
