"""Rates: what this machine does in a second, sampled between the runs that they are compared with."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kvloom.bench.bound import linear_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvloom.hf import Decoder

BUFFER_BYTES = 128 * 2**20
"""Of the memory that is read and copied: more than any cache of a processor holds."""

LEAST_S = 0.02
"""A sample takes at least so long."""

PASSES = 3
"""Passes over memory, of which the fastest is the sample."""


class Rates:
    """The machine's rates with this model's weight matrices and number format; each is the median of its
    samples.

    Matrices are taken layer by layer, so that they come from memory as in a forward, and products are written
    to a buffer that exists.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._weights = linear_weights(decoder)
        self._samples: dict[str | int, list[float]] = defaultdict(list)
        self._buffer = torch.ones(BUFFER_BYTES // 4, device=decoder.device)
        self._copy = torch.ones_like(self._buffer)

    def matmul(self, rows: int) -> float:
        """FLOPs in a second, products with `rows` rows."""
        if rows not in self._samples:
            self.sample([rows])
        return median(self._samples[rows])

    @property
    def read(self) -> float:
        """Bytes read from memory in a second."""
        if "read" not in self._samples:
            self.sample([])
        return median(self._samples["read"])

    @property
    def copy(self) -> float:
        """Bytes read and written in a second while memory is copied."""
        if "copy" not in self._samples:
            self.sample([])
        return median(self._samples["copy"])

    def clear(self) -> None:
        """Forgets the samples."""
        self._samples.clear()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = sorted(name for name in self._samples if isinstance(name, int))
        matmul = {str(number): median(self._samples[number]) for number in rows}
        return {"matmul_flops_s": matmul, "read_bytes_s": self.read, "copy_bytes_s": self.copy}

    @torch.no_grad()
    def sample(self, rows: Iterable[int]) -> None:
        """One more sample of memory, and of products with each of these numbers of rows."""
        num_bytes = self._buffer.nbytes
        self._samples["read"].append(num_bytes / self._fastest(self._buffer.sum))
        self._samples["copy"].append(2 * num_bytes / self._fastest(lambda: self._copy.copy_(self._buffer)))
        for number in sorted(set(rows)):
            self._samples[number].append(self._matmul(number))

    def _fastest(self, work: Callable[[], Any]) -> float:
        return min(self._timed(work) for _ in range(PASSES))

    def _timed(self, work: Callable[[], Any]) -> float:
        self._decoder.synchronize()
        start = time.perf_counter()
        work()
        self._decoder.synchronize()
        return time.perf_counter() - start

    def _matmul(self, rows: int) -> float:
        """One sample: layers in turn, twice as many each time until they take long enough."""
        options: Any = {"dtype": self._decoder.dtype, "device": self._decoder.device}
        shapes = {weight.shape for layer in self._weights for weight in layer}
        given = {shape[1]: torch.randn(rows, shape[1], **options) for shape in shapes}
        into = {shape[0]: torch.empty(rows, shape[0], **options) for shape in shapes}
        first, number = 0, 1
        self._products(0, 1, given, into)  # the first of a shape may choose its kernel
        seconds = self._timed(partial(self._products, first, number, given, into))
        while seconds < LEAST_S:
            first, number = first + number, 2 * number
            seconds = self._timed(partial(self._products, first, number, given, into))
        layers = [self._weights[place % len(self._weights)] for place in range(first, first + number)]
        return 2 * rows * sum(weight.numel() for layer in layers for weight in layer) / seconds

    def _products(
        self, first: int, number: int, given: dict[int, torch.Tensor], into: dict[int, torch.Tensor]
    ) -> None:
        for place in range(first, first + number):
            for weight in self._weights[place % len(self._weights)]:
                num_out, num_in = weight.shape
                torch.mm(given[num_in], weight.t(), out=into[num_out])
