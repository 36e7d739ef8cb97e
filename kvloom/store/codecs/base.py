"""Codec: how the keys and values of one layer become the tensors of a file, and back.

A codec is one file here and one registration. It never sees the model: keys come rotated, as computed, and
leave so. What it loses is bounded number by number (`bound`), and the tests hold it to that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Kind = Literal["keys", "values"]


class NotCodable(ValueError):
    """The tensor has no place in the codec; the message completes "keys.3 ..."."""


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor that is not there yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Codec(ABC):
    """Base of all codecs. Tensors are keys or values of one layer, (H, T, D) floating point.

    The names, dtypes and shapes of the parts follow from those of the tensor alone, so that a reader knows
    them before it looks at a byte.
    """

    name: ClassVar[str]  # set by `codecs.register`

    @abstractmethod
    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        """What `encode` makes of a tensor of that dtype and shape, by name."""

    @abstractmethod
    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        """The parts, by name; raises ``NotCodable`` for numbers that the codec cannot hold."""

    @abstractmethod
    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        """The tensor, of the dtype and shape it had; finite parts give finite numbers."""

    @abstractmethod
    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        """(H, T, D) float64: no number that comes back is farther than this from the one that went in."""


codecs: Registry[Codec] = Registry("codec", "kvloom.store.codecs")


def computing_dtype(plain: torch.dtype) -> torch.dtype:
    """What codecs compute in: float32, or float64 for float64."""
    return torch.float64 if plain == torch.float64 else torch.float32


def round_up(numbers: Tensor) -> Tensor:
    """Each number at least 0 as the next bfloat16 that is not smaller."""
    rounded = numbers.to(torch.bfloat16)
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.to(numbers.dtype) < numbers, up, rounded)


def narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in the dtype, those beyond its range at its ends."""
    limit = torch.finfo(dtype).max
    return numbers.clamp_(-limit, limit).to(dtype)


def check_finite(*limits: Tensor) -> None:
    """Raises ``NotCodable`` unless every number is finite."""
    if not all(bool(limit.isfinite().all()) for limit in limits):
        raise NotCodable("holds infinities, NaN or numbers beyond bfloat16's range")


def rounding(tensor: Tensor) -> Tensor:
    """(H, T, D) float64: what the last bits lose, of the tensor's own dtype and of computing in float32."""
    limits = torch.finfo(tensor.dtype)
    eps = limits.eps + 16 * torch.finfo(computing_dtype(tensor.dtype)).eps
    return tensor.double().abs() * eps + limits.smallest_normal * limits.eps
