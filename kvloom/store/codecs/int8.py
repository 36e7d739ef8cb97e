"""int8: 256 steps; keys by channel, values by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import Codec, Kind, Spec, codecs
from kvloom.store.codecs.grid import Grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KEY_GROUP = 64  # tokens of one channel
VALUE_GROUP = 64  # channels of one token


def grids(levels: int, key_group: int, value_group: int) -> dict[Kind, Grid]:
    """Keys have a few channels far larger than the others, the same for all tokens; values have not."""
    return {"keys": Grid(levels, key_group, dim=1), "values": Grid(levels, value_group, dim=2)}


GRIDS = grids(256, KEY_GROUP, VALUE_GROUP)


@codecs.register("int8")
@dataclass(frozen=True)
class Int8(Codec):
    """A byte for each number, and a step and a middle for each 64.

    Error: half a step, where 255 steps span the group; steps are up to 1 % larger for being bfloat16, and
    groups far from zero by 1/256 of their distance.
    """

    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        spec = GRIDS[kind].spec(plain.shape)
        return {"codes": replace(plain, dtype=torch.uint8), "step": spec, "middle": spec}

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        codes, step, middle = GRIDS[kind].encode(tensor)
        return {"codes": codes, "step": step, "middle": middle}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        return GRIDS[kind].decode(parts["codes"], parts["step"], parts["middle"], plain.dtype)

    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        return GRIDS[kind].bound(tensor)
