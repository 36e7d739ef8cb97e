"""bf16: every number as the nearest bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import Codec, Kind, Spec, check_finite, codecs, computing_dtype, narrowed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@codecs.register("bf16")
@dataclass(frozen=True)
class BF16(Codec):
    """Half the bytes of float32. Error: at most 2**-8 of the number, or 2**-134 (2**-150 more for float64,
    which is rounded twice); none for bfloat16 itself.

    Numbers beyond bfloat16's largest become that, which is within the same 2**-8 for float32.
    """

    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        return {"codes": replace(plain, dtype=torch.bfloat16)}

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.dtype == torch.bfloat16:
            return {"codes": tensor}
        check_finite(tensor.float())
        numbers = tensor.to(computing_dtype(tensor.dtype), copy=True)
        return {"codes": narrowed(numbers, torch.bfloat16)}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        if plain.dtype == torch.float16:
            return narrowed(parts["codes"].float(), plain.dtype)
        return parts["codes"].to(plain.dtype)

    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            return torch.zeros(tensor.shape, dtype=torch.float64)
        # float64 is rounded to float32 on the way, by 2**-32 of the number or by 2**-150.
        smallest = 2.0**-134 + (2.0**-150 if tensor.dtype == torch.float64 else 0.0)
        return (tensor.double().abs() * (2.0**-8 + 2.0**-32)).clamp(min=smallest)
