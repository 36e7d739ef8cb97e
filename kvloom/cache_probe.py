"""CacheProbe: all that a compressor may look at, layer by layer, without side effects.

Places count what a layer holds now; rows count what the cache ever held. Before anything was dropped they are
the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvloom.attention import attention_weights
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from kvloom.cache import SplicedCache
    from kvloom.observe import Observer

Support = Literal["all", "candidates"]

_UNSEEN = (
    "since not all of its rows were computed under observation (spliced chunks, or tokens that "
    "model.generate appended); choose a compressor that needs no record, such as keydiff or knorm"
)


class CacheProbe:
    """The view of one cache and of what was recorded while it was filled.

    `candidates` is the range of rows that may be dropped: of a prompt all, while decoding the generated ones
    but the last few.
    """

    def __init__(
        self,
        cache: SplicedCache,
        observer: Observer,
        *,
        phase: str = "prefill",
        candidates: range | None = None,
    ) -> None:
        self._cache = cache
        self._observer = observer
        self.phase = phase
        self.num_layers = len(cache.layers)
        self.num_rows = cache.num_rows
        self.candidates = range(self.num_rows) if candidates is None else candidates
        self.spans = list(cache.spans)

    def held(self, layer: int) -> int:
        """Places that the layer holds."""
        return self._cache.layers[layer].length

    def rows(self, layer: int) -> Tensor:
        """(T,) int64, or (H, T) where heads hold different rows: the row at each place."""
        rows = self._cache.layers[layer].rows
        return torch.arange(self.num_rows, device=self._cache.device) if rows is None else rows

    def is_last(self, layer: int, size: int) -> Tensor:
        """(T,) or (H, T) bool: whether what stands at a place is one of the last `size` rows."""
        return self.rows(layer) >= self.num_rows - size

    def is_candidate(self, layer: int) -> Tensor:
        """(T,) or (H, T) bool: whether what stands at a place may be dropped."""
        rows = self.rows(layer)
        return (rows >= self.candidates.start) & (rows < self.candidates.stop)

    def keys(self, layer: int) -> Tensor:
        """(H, T, D), rotated to their positions, not to be written to."""
        return self._cache.keys(layer)

    def values(self, layer: int) -> Tensor:
        """(H, T, D), not to be written to."""
        return self._cache.values(layer)

    def positions(self, layer: int) -> Tensor:
        """(T,) or (H, T) int64."""
        return self._cache.key_positions(layer)

    @property
    def next_position(self) -> int:
        """The position of the token that comes next."""
        return self._cache.next_position

    def side(self, name: str, layer: int) -> Tensor:
        """(T,) or (H, T) float32: a signal frozen when the rows were made; "drift" is the layer's own.

        Raises ``MethodError`` where some row has none, because another forward made it.
        """
        data = self._cache.side.get(name)
        if data is not None and data.shape[-1] == self.num_rows:
            columns = (data if data.ndim == 1 else data[layer])[self.rows(layer)]
            if not columns.isnan().any():
                return columns
        raise MethodError(f"this cache lacks the {name} of some rows, {_UNSEEN}")

    def window(self, layer: int, size: int, *, support: Support = "all") -> Tensor:
        """(H, G, W, T) float32: how the last W queries attend to what the layer holds, by place.

        W is `size`, or fewer where fewer were observed: of a spliced prompt the question's only. The softmax
        runs over all keys up to each query, or, with support "candidates", over the candidates only, as RPC
        takes it. Raises ``MethodError`` where no query was kept.
        """
        query = self._observer.queries.get(layer)
        if query is None or not self._is_seen():
            raise MethodError(f"this cache lacks its last queries, {_UNSEEN}")
        size = min(size, query.shape[1])
        keys, key_positions = self.keys(layer).float(), self.positions(layer)
        # The queries are those of the last rows, whether these are still held or not.
        asked = self._cache.positions[-size:]
        mask = key_positions.unsqueeze(-2) <= asked.unsqueeze(-1)
        if support == "candidates":
            mask = mask & self.is_candidate(layer).unsqueeze(-2)
        weights = attention_weights(query[:, -size:].float(), keys, mask, self._observer.decoder.heads[layer])
        return weights.unflatten(0, (len(keys), -1))

    def received(self, layer: int) -> Tensor:
        """(H, G, T) float32: the attention each key received, summed over every query so far.

        Raises ``MethodError`` where some query was not seen.
        """
        held = self._observer.received.get(layer)
        if held is None or not (self._is_seen() and self._observer.is_whole):
            raise MethodError(f"this cache lacks the attention of some queries, {_UNSEEN}")
        return held.unflatten(0, (len(self.keys(layer)), -1))

    def query_moments(self, layer: int) -> tuple[Tensor, Tensor]:
        """Mean (H * G, D) and covariance (H * G, D, D), float32, of the queries before RoPE.

        Raises ``MethodError`` where none was seen.
        """
        if self._observer.num_summed == 0:
            raise MethodError(f"this cache lacks the moments of its queries, {_UNSEEN}")
        return self._observer.moments(layer)

    def scaling(self, layer: int) -> float:
        """What scores are multiplied by before the softmax."""
        return self._observer.decoder.heads[layer].scaling

    @property
    def vocab_size(self) -> int:
        return self._observer.decoder.vocab_size

    def rotations(self, positions: Tensor) -> Tensor:
        """(N, D, D) float32: ``x @ m`` rotates x to each position."""
        return self._observer.decoder.rotations(positions)

    def _is_seen(self) -> bool:
        """Whether the last rows were computed under observation."""
        return self._observer.num_rows == self.num_rows
