"""raw: every bit as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import Codec, Kind, Spec, codecs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@codecs.register("raw")
@dataclass(frozen=True)
class Raw(Codec):
    """The tensor itself. Error: none, NaN payloads included."""

    def parts(self, kind: Kind, plain: Spec) -> dict[str, Spec]:
        return {"codes": plain}

    def encode(self, kind: Kind, tensor: Tensor) -> dict[str, Tensor]:
        return {"codes": tensor}

    def decode(self, kind: Kind, parts: Mapping[str, Tensor], plain: Spec) -> Tensor:
        return parts["codes"]

    def bound(self, kind: Kind, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=torch.float64)
