"""int4: 16 steps, two codes to a byte; keys by channel, values by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import Codec, Kind, Spec, codecs
from kvloom.store.codecs.int8 import grids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KEY_GROUP = 32  # tokens of one channel
VALUE_GROUP = 32  # channels of one token
GRIDS = grids(16, KEY_GROUP, VALUE_GROUP)


@codecs.register("int4")
@dataclass(frozen=True)
class Int4(Codec):
    """Half a byte for each number, and a step and a middle for each 32.

    Error: half a step, where 15 steps span the group; steps are up to 1 % larger for being bfloat16, and
    groups far from zero by 1/256 of their distance.
    """

    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        spec = GRIDS[kind].spec(plain.shape)
        packed = Spec(torch.uint8, ((math.prod(plain.shape) + 1) // 2,))
        return {"codes": packed, "step": spec, "middle": spec}

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        codes, step, middle = GRIDS[kind].encode(tensor)
        return {"codes": pack(codes), "step": step, "middle": middle}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        codes = unpack(parts["codes"], math.prod(plain.shape)).view(plain.shape)
        return GRIDS[kind].decode(codes, parts["step"], parts["middle"], plain.dtype)

    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        return GRIDS[kind].bound(tensor)


def pack(codes: Tensor) -> Tensor:
    """(bytes,) uint8: codes 0 .. 15 of any shape, row-major, two to a byte, the first in the low half."""
    flat = codes.flatten()
    if len(flat) % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat[::2] | (flat[1::2] << 4)


def unpack(packed: Tensor, count: int) -> Tensor:
    """(count,) uint8: the codes that `pack` was given."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten()[:count]
