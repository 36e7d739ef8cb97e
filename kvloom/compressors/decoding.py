"""Decoding: an answer that is compressed while it grows, on RPC's schedule (NeurIPS 2025)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from kvloom.compressors.compress import Compression, compress_generated

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.compressors.base import Growing
    from kvloom.observe import Observer


class Decoding:
    """Takes one generated token at a time; before every `every`-th further one, generated rows are dropped.

    The n-th time, ``floor(keep * n * every)`` of the generated rows before the last `recent` stay, and those
    last ones: the prompt is never touched, signals are those of the moment a token was generated, and an
    answer that ends before is not compressed.
    """

    def __init__(self, cache: SplicedCache, observer: Observer, compressor: Growing | None) -> None:
        self.cache = cache
        self.observer = observer
        self.compressor = compressor
        self.num_prompt = cache.num_rows
        self.done: list[Compression] = []

    def step(self, token: int) -> Tensor:
        """(V,) float32 logits after the token, which is appended to the cache."""
        self._compress_if_due()
        return self.observer.run(torch.tensor([token]))

    def follow(self, token_ids: Tensor) -> Tensor:
        """(S, V) float32 logits after each of token_ids (S,), as one `step` for each; what lies between
        two compressions is run at once.
        """
        logits = []
        while len(token_ids):
            self._compress_if_due()
            room = self._due - (self.cache.num_rows - self.num_prompt)
            logits.append(self.observer.follow(token_ids[:room]))
            token_ids = token_ids[room:]
        return torch.cat(logits)

    @property
    def _due(self) -> int:
        """Generated rows at which rows are dropped next."""
        return sys.maxsize if self.compressor is None else (len(self.done) + 1) * self.compressor.every

    def _compress_if_due(self) -> None:
        due = self._due
        if self.compressor is None or self.cache.num_rows - self.num_prompt < due:
            return
        self.done.append(
            compress_generated(
                self.compressor,
                self.cache,
                self.observer,
                num_prompt=self.num_prompt,
                budget=int(self.compressor.keep * due + 1e-9),
            )
        )
