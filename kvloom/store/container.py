"""The file around an entry: a safetensors header in one spelling, a checksum, tensors without gaps.

The header is written and read here rather than by the safetensors library: its writer either copies all
tensors or hides the cause of a failed write, and its reader maps the file, so that a file cut short under us
would kill the process. What the tensors mean is said in `kvloom.store.format`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from kvloom.store.base import fields
from kvloom.store.lookup import DamagedEntry, UnreadableEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

FORMAT = "kvloom-chunk"
PLAIN, CODED = 1, 2  # format versions: tensors as they are; tensors that a codec made, or a cipher
ALIGNMENT = 8  # of the tensors' first byte, so that every tensor lies on a multiple of its element size
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")  # what keys and values are

_INTEGERS = {"token_ids": "I64", "rows": "I32"}
_METADATA = {"format", "version", "key", "fingerprint", "start", "checksum"}
_KINDS_OF_METADATA = {
    PLAIN: [_METADATA | {"num_layers"}],
    CODED: [
        _METADATA | {"num_layers", "codec", "plain"},
        _METADATA | {"num_tokens", "codec", "cipher", "key_id", "nonce"},
    ],
}
_DECIMAL = re.compile("0|[1-9][0-9]{0,17}")


class NewerFormat(UnreadableEntry):
    """The bytes are of a later format version."""


@dataclass(frozen=True)
class Extent:
    """Where one tensor lies: bytes ``begin .. end - 1`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def tensor(self, content: memoryview) -> Tensor:
        """The tensor, sharing the memory of the file's `content`."""
        dtype, count = DTYPES[self.dtype], math.prod(self.shape)
        if count == 0:  # torch.frombuffer refuses empty buffers
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype, count=count, offset=self.begin).view(self.shape)


def write(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The file's bytes in order, in pieces that share the memory of tensors contiguous on the CPU.

    `tensors` come in canonical order; `metadata` are all but the checksum.
    """
    contents = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    # Widest elements first: with no gaps between tensors, this is what keeps each of them aligned.
    file_order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    extents: dict[str, Extent] = {}
    end = 0
    for name in file_order:
        begin, end = end, end + len(contents[name])
        extents[name] = Extent(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape), begin, end)
    total = checksum(metadata, [(extents[name], contents[name]) for name in tensors])
    header: dict[str, Any] = {"__metadata__": {**metadata, "checksum": total}}
    for name in file_order:
        extent = extents[name]
        offsets = [extent.begin, extent.end]
        header[name] = {"dtype": extent.dtype, "shape": list(extent.shape), "data_offsets": offsets}
    text = _padded(_compact_json(header))
    return [len(text).to_bytes(8, "little") + text, *(contents[name] for name in file_order)]


Header = tuple[dict[str, Any], int]
"""A file's header, and where its tensors begin."""


def read_header(content: memoryview) -> Header:
    """The header, its metadata complete and of a version known here, and where the tensors begin."""
    require(len(content) >= 8, f"{len(content)} bytes are too few to be a chunk file")
    length = int.from_bytes(content[:8], "little")
    limit = min(len(content) - 8, MAX_HEADER_BYTES)
    require(length <= limit, f"its header of {length} bytes does not fit in {limit}")
    text = bytes(content[8 : 8 + length])
    try:
        header = json.loads(text.decode())
        canonical = _padded(_compact_json(header))
    except (ValueError, RecursionError):  # the second line: half a surrogate pair, which is no text
        raise DamagedEntry("is damaged: its header is not JSON") from None
    require(isinstance(header, dict), "its header is not a JSON object")
    metadata = header.get("__metadata__")
    is_ours = isinstance(metadata, dict) and metadata.get("format") == FORMAT
    require(is_ours, f"its format is not {FORMAT}")
    # Before anything else is asked of the file, since a later version may change all the rest.
    version = decimal(metadata, "version")
    if version > CODED:
        raise NewerFormat(f"has format version {version}, beyond {CODED}; update kvloom to read it")
    require(version in _KINDS_OF_METADATA, f"there is no format version {version}")
    # One spelling only, else a flipped bit that turns one white space into another would pass unseen.
    require(text == canonical, "its header is not in the canonical form")
    optional = {"compressor"} if "num_layers" in metadata else set()
    are_known = set(metadata) - optional in _KINDS_OF_METADATA[version]
    require(are_known, "its metadata are not the expected ones")
    require(all(isinstance(v, str) for v in metadata.values()), "its metadata are not all text")
    return header, 8 + length


def read_extents(header: Mapping[str, Any], data_begin: int) -> dict[str, Extent]:
    """Where each tensor lies, by name; that they cover the file is for `check_cover`."""
    version = int(header["__metadata__"]["version"])
    return {
        name: read_extent(name, entry, data_begin, version)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_extent(name: str, entry: Any, data_begin: int, version: int) -> Extent:
    """Where one tensor lies, its dtype, shape and offsets in accord."""
    is_complete = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    require(is_complete, f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    require(isinstance(dtype, str) and fits(name, dtype, version), f"{name} has the dtype {dtype}")
    require(_are_counts(shape), f"{name} has the shape {shape}")
    require(_are_counts(offsets) and len(offsets) == 2, f"{name} has the offsets {offsets}")
    item_bytes = DTYPES[dtype].itemsize
    begin, end = (data_begin + offset for offset in offsets)
    require(begin % item_bytes == 0, f"{name} does not lie on a multiple of {item_bytes} bytes")
    num_bytes = math.prod(shape) * item_bytes
    require(end - begin == num_bytes, f"{name} has {end - begin} bytes, its shape needs {num_bytes}")
    return Extent(name, dtype, tuple(shape), begin, end)


def check_cover(extents: Iterable[Extent], data_begin: int, file_end: int) -> None:
    """Raises ``DamagedEntry`` unless the extents cover ``data_begin .. file_end - 1`` exactly once."""
    position = data_begin
    for extent in sorted(extents, key=lambda extent: (extent.begin, extent.end)):
        require(extent.begin == position, f"{extent.name} begins at {extent.begin}, not {position}")
        position = extent.end
    require(position == file_end, f"its tensors end at {position}, the file at {file_end}")


def check_contents(metadata: Mapping[str, str], extents: Sequence[Extent], content: memoryview) -> None:
    """Raises ``DamagedEntry`` unless the checksum is that of metadata and tensors, in canonical order."""
    found = checksum(
        {name: value for name, value in metadata.items() if name != "checksum"},
        [(extent, content[extent.begin : extent.end]) for extent in extents],
    )
    require(found == metadata["checksum"], "its checksum is not that of its contents")


def checksum(metadata: Mapping[str, str], tensors: Sequence[tuple[Extent, memoryview]]) -> str:
    """The checksum over all metadata but itself, and over `tensors` in canonical order."""
    digest = xxhash.xxh3_128()
    pieces: list[bytes | memoryview] = [*metadata_fields(metadata)]
    for extent, content in tensors:
        shape = ",".join(str(size) for size in extent.shape)
        pieces += [extent.name.encode(), extent.dtype.encode(), shape.encode(), content]
    for field in fields(pieces):
        digest.update(field)
    return f"xxh3_128:{digest.hexdigest()}"


def metadata_fields(metadata: Mapping[str, str]) -> list[bytes]:
    """Names and values by ascending name, the checksum's left out."""
    names = sorted(set(metadata) - {"checksum"})
    return [piece.encode() for name in names for piece in (name, metadata[name])]


def fits(name: str, dtype: str | None, version: int) -> bool:
    """True if a tensor of that name may have the dtype."""
    wanted = _INTEGERS.get(name.partition(".")[0])
    if wanted:
        return dtype == wanted
    return dtype in FLOATS if version == PLAIN else dtype in DTYPES and dtype not in _INTEGERS.values()


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major; they share its memory if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def decimal(metadata: Mapping[str, Any], name: str) -> int:
    """The number that a metadata entry holds."""
    text = metadata.get(name)
    is_number = isinstance(text, str) and _DECIMAL.fullmatch(text) is not None
    require(is_number, f"its {name} {text!r} is not a number")
    return int(str(text))


def require(condition: bool, fault: str) -> None:
    """Raises ``DamagedEntry`` with the fault unless the condition holds."""
    if not condition:
        raise DamagedEntry(f"is damaged: {fault}")


def _compact_json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def _padded(text: bytes) -> bytes:
    return text + b" " * (-len(text) % ALIGNMENT)


def _are_counts(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
