"""Coding: a codec, with or without zstd behind it, by the text that options and files name it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from kvloom.errors import MethodError
from kvloom.store.codecs.base import Codec, Kind, Spec, codecs
from kvloom.store.codecs.raw import Raw

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SUFFIX = "+zstd"
LEVEL = 3  # zstd's own default; higher ones take much longer and gain a percent or two


@dataclass(frozen=True)
class Coding:
    """How the keys and values of an entry are written. `parse` makes it from a text such as ``int8+zstd``."""

    codec: Codec
    is_compressed: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ``MethodError`` for a codec that is not known, and for zstd without its package."""
        name, plus, rest = text.partition("+")
        if plus and rest != "zstd":
            raise MethodError(f"codec {text!r}: only zstd can follow a codec; write '{name}{SUFFIX}'")
        if name == "zstd" and not plus:
            raise MethodError("codec 'zstd' names no codec to follow; write 'raw+zstd' or 'int8+zstd'")
        coding = cls(codecs.build(name), bool(plus))
        if coding.is_compressed:
            _zstandard()
        return coding

    def __str__(self) -> str:
        return self.codec.name + (SUFFIX if self.is_compressed else "")

    @property
    def is_plain(self) -> bool:
        """True if the tensors are written as they are."""
        return str(self) == "raw"

    def stored(self, kind: Kind, plain: Spec) -> dict[str, Spec | None]:
        """Dtype and shape of each part in the file; None where only its bytes tell: a list of them."""
        specs = self.codec.parts(kind, plain)
        return dict.fromkeys(specs) if self.is_compressed else {**specs}

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        """The parts as they go into the file; raises ``NotCodable``."""
        parts = self.codec.encode(kind, tensor.detach())
        if not self.is_compressed:
            return parts
        compressor = _zstandard().ZstdCompressor(level=LEVEL)
        return {name: _squeeze(compressor, part) for name, part in parts.items()}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        """The tensor; raises ``ValueError`` for parts that do not give one of that dtype and shape."""
        if self.is_compressed:
            specs = self.codec.parts(kind, plain)
            parts = {name: _expand(parts[name], spec) for name, spec in specs.items()}
        tensor = self.codec.decode(kind, parts, plain)
        assert (tensor.dtype, tuple(tensor.shape)) == (plain.dtype, plain.shape), f"{self} changed the shape"
        return tensor


RAW = Coding(Raw())


def _squeeze(compressor: Any, part: Tensor) -> Tensor:
    """(bytes,) uint8: the part's first bytes of each number, then the second ones and so on, compressed.

    Signs and exponents lie together that way, and those are what is regular in keys and values.
    """
    planes = part.cpu().contiguous().flatten().view(torch.uint8).view(-1, part.element_size()).T
    frame = compressor.compress(planes.contiguous().numpy().tobytes())
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def _expand(frame: Tensor, spec: Spec) -> Tensor:
    """The part that was squeezed; raises ``ValueError`` unless it has just the bytes of `spec`."""
    zstandard = _zstandard()
    content = frame.numpy().tobytes()
    try:
        # Asked first: a frame that claims to be larger takes no memory.
        is_right = zstandard.frame_content_size(content) == spec.num_bytes
        plain = zstandard.ZstdDecompressor().decompress(content) if is_right else b""
    except zstandard.ZstdError as error:
        raise ValueError(f"a part is no zstd frame: {error}") from None
    if not is_right or len(plain) != spec.num_bytes:
        raise ValueError(f"a part does not expand to the {spec.num_bytes} bytes of its shape")
    if not plain:
        return torch.empty(spec.shape, dtype=spec.dtype)
    planes = torch.frombuffer(bytearray(plain), dtype=torch.uint8).view(spec.dtype.itemsize, -1)
    return planes.T.contiguous().flatten().view(spec.dtype).view(spec.shape)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MethodError(
            "zstd needs the package zstandard: pip install 'kvloom[zstd]', or leave +zstd off"
        ) from None
    return zstandard
