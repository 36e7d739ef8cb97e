"""Uniform grids: numbers of a group as steps above and below its middle.

A group of numbers between `low` and `high` becomes codes 0 .. levels - 1, a step and a middle:
number = middle + (code - (levels - 1) / 2) * step. Step and middle are bfloat16, which has float32's range;
the codes are counted from the middle as stored, and the step is rounded up, so that no number falls off the
grid. Groups are runs of `group` tokens of one channel (keys) or of `group` channels of one token (values); a
last, shorter one takes what is left.

No library's scheme is used: torch's own quantized tensors have neither groups nor a middle off the grid, and
those of quanto and HQQ, which transformers offers for its caches, are made for weights and need their package
to be read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.store.codecs.base import Spec, check_finite, computing_dtype, narrowed, round_up, rounding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """`levels` steps for each run of `group` numbers along `dim` of (H, T, D)."""

    levels: int
    group: int
    dim: int

    def spec(self, shape: tuple[int, ...]) -> Spec:
        """Of step and middle: the shape with `dim` in groups."""
        sizes = list(shape)
        sizes[self.dim] = -(-sizes[self.dim] // self.group)
        return Spec(torch.bfloat16, tuple(sizes))

    @property
    def _centre(self) -> float:
        return (self.levels - 1) / 2

    def encode(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (H, T, D) uint8, step and middle; raises ``NotCodable`` for what is not finite."""
        numbers = tensor.to(computing_dtype(tensor.dtype))
        codes = torch.empty(numbers.shape, dtype=torch.uint8, device=tensor.device)
        spec = self.spec(tuple(tensor.shape))
        step, middle = (torch.empty(spec.shape, dtype=spec.dtype, device=tensor.device) for _ in range(2))
        for part, groups in self._runs(numbers.shape[self.dim]):
            here = self._grouped(numbers, part, groups)
            low, high = here.amin(self.dim + 1), here.amax(self.dim + 1)
            mid = narrowed(low / 2 + high / 2, torch.bfloat16)
            exact = mid.to(numbers.dtype)
            half = torch.maximum(high - exact, exact - low)
            size = round_up(half / self._centre)
            # Whatever the code, neither it nor the sum that decodes it leaves the range.
            check_finite(low, high, exact.abs() + size.to(numbers.dtype) * self.levels)
            divisor = size.to(numbers.dtype).masked_fill(size == 0, 1)
            counted = ((here - exact.unsqueeze(self.dim + 1)) / divisor.unsqueeze(self.dim + 1)).add_(
                self._centre
            )
            self._grouped(codes, part, groups).copy_(counted.round_().clamp_(0, self.levels - 1))
            step.narrow(self.dim, groups.start, len(groups)).copy_(size)
            middle.narrow(self.dim, groups.start, len(groups)).copy_(mid)
        return codes, step, middle

    def decode(self, codes: Tensor, step: Tensor, middle: Tensor, dtype: torch.dtype) -> Tensor:
        """(H, T, D) of the dtype."""
        numbers = codes.to(computing_dtype(dtype))
        size = step.to(numbers.dtype)
        half = self._centre * size
        lowest, reach = middle.to(numbers.dtype) - half, middle.to(numbers.dtype).abs() + half
        for part, groups in self._runs(numbers.shape[self.dim]):
            here = self._grouped(numbers, part, groups)
            first, length = groups.start, len(groups)
            here.mul_(size.narrow(self.dim, first, length).unsqueeze(self.dim + 1))
            here.add_(lowest.narrow(self.dim, first, length).unsqueeze(self.dim + 1))
        # Looking at the groups spares a pass over the numbers, which hardly ever lie so far out.
        is_far = reach.numel() > 0 and float(reach.max()) > torch.finfo(dtype).max * (1 - 2.0**-8)
        return narrowed(numbers, dtype) if is_far else numbers.to(dtype)

    def bound(self, tensor: Tensor) -> Tensor:
        """(H, T, D) float64: half a step, and what the last bits lose of the group's largest."""
        result = torch.empty(tensor.shape, dtype=torch.float64)
        lost = rounding(tensor)
        for part, groups in self._runs(tensor.shape[self.dim]):
            here = self._grouped(tensor.double(), part, groups)
            low, high = here.amin(self.dim + 1), here.amax(self.dim + 1)
            # The middle is off by 2**-8 of itself and the step 2**-7 too large, at most, as bfloat16.
            half = (high - low) / 2 + (low / 2 + high / 2).abs() * 2.0**-8 + 2.0**-133
            step = half / self._centre * (1 + 2.0**-7) + 2.0**-133
            last = self._grouped(lost, part, groups).amax(self.dim + 1) + half * 2.0**-20
            self._grouped(result, part, groups).copy_((step / 2 + last).unsqueeze(self.dim + 1))
        return result

    def _runs(self, length: int) -> Iterator[tuple[range, range]]:
        """Places along `dim` and the groups that they fill: the whole groups, then the shorter one."""
        num_whole = length // self.group
        if num_whole:
            yield range(num_whole * self.group), range(num_whole)
        if length % self.group:
            yield range(num_whole * self.group, length), range(num_whole, num_whole + 1)

    def _grouped(self, tensor: Tensor, part: range, groups: range) -> Tensor:
        """A view of part of the tensor, `dim` as (groups, numbers in each)."""
        return tensor.narrow(self.dim, part.start, len(part)).unflatten(self.dim, (len(groups), -1))
