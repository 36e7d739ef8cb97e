"""fp8: 8-bit floating point (e4m3) under one scale for each head and channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import (
    Codec,
    Kind,
    Spec,
    check_finite,
    codecs,
    computing_dtype,
    narrowed,
    round_up,
    rounding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LARGEST = 448.0  # of float8_e4m3fn


@codecs.register("fp8")
@dataclass(frozen=True)
class FP8(Codec):
    """A quarter of the bytes of float32, and a scale (H, D) that puts each channel's largest at 448.

    Error: at most 2**-4 of the number, or of 2**-14 of its channel's largest where that is more; and the
    rounding to the tensor's own dtype.
    """

    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        heads, _, dim = plain.shape
        return {
            "codes": replace(plain, dtype=torch.float8_e4m3fn),
            "scale": Spec(torch.bfloat16, (heads, dim)),
        }

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        numbers = tensor.to(computing_dtype(tensor.dtype))
        scale = round_up(_largest(numbers) / LARGEST)
        check_finite(scale)
        divisor = scale.to(numbers.dtype).masked_fill(scale == 0, 1)
        codes = (numbers / divisor[:, None]).clamp_(-LARGEST, LARGEST)
        return {"codes": codes.to(torch.float8_e4m3fn), "scale": scale}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        dtype = computing_dtype(plain.dtype)
        numbers = parts["codes"].to(dtype).mul_(parts["scale"].to(dtype)[:, None])
        return narrowed(numbers, plain.dtype)

    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        numbers = tensor.double()
        # The scale is 2**-7 larger at most for being a bfloat16; 2**-10 is half the step next to zero.
        scale = _largest(numbers) / LARGEST * (1 + 2.0**-7) + 2.0**-133
        relative = numbers.abs() * (2.0**-4 + 2.0**-20) + 2.0**-141  # below it a scale is 0
        return torch.maximum(relative, (scale * 2.0**-10)[:, None]) + rounding(tensor)


def _largest(numbers: Tensor) -> Tensor:
    """(H, D): of each channel."""
    heads, tokens, dim = numbers.shape
    return numbers.abs().amax(1) if tokens else numbers.new_zeros(heads, dim)
