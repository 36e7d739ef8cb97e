"""SplicedCache: a transformers cache that knows where its tokens sit.

Rows are places in the cache, counted from the header's first token; positions are where RoPE puts them.
Buffers are allocated once, with room for the question and the answer: rows are overwritten and appended in
place, and what the model sees is a view.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"
"""What this version of transformers calls the cache that a forward reads and fills."""

UNKNOWN_TOKEN = -1
"""Recorded as the token id of rows that something else than kvloom appended (`model.generate`): a cache sees
no ids.
"""


class KVShape(NamedTuple):
    """Shape of one layer's KV: heads and head dims are read off tensors, never computed from a config."""

    num_heads: int
    key_dim: int
    value_dim: int


class BufferLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers (1, H, capacity, D), of which the first `length` rows are in
    use.
    """

    is_sliding = False

    def __init__(self, shape: KVShape, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.key_buffer = torch.empty(
            (1, shape.num_heads, capacity, shape.key_dim), dtype=dtype, device=device
        )
        self.value_buffer = torch.empty(
            (1, shape.num_heads, capacity, shape.value_dim), dtype=dtype, device=device
        )
        self.length = 0
        self.overwrite: Tensor | None = None  # (S,) rows that the next update writes over before it appends
        self.rows: Tensor | None = None  # (H, T) which of the cache's rows are left; None: all of them
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor, rows: Tensor | None) -> None:
        """Holds keys and values (H, T, D) and nothing else, of the cache's `rows` (H, T) or of all."""
        self.key_buffer, self.value_buffer = keys[None].clone(), values[None].clone()
        self.length, self.rows = keys.shape[1], rows

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.value_buffer[:, :, : self.length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values (1, H, T, D), after the first rows given overwrote `overwrite` and the rest
        were appended.
        """
        num_over = 0 if self.overwrite is None else len(self.overwrite)
        if self.overwrite is not None and self.rows is None:
            self.key_buffer.index_copy_(2, self.overwrite, key_states[:, :, :num_over])
            self.value_buffer.index_copy_(2, self.overwrite, value_states[:, :, :num_over])
        elif self.overwrite is not None:
            head, given, place = self._places(self.overwrite)
            self.key_buffer[0, head, place] = key_states[0, head, given]
            self.value_buffer[0, head, place] = value_states[0, head, given]
        first, self.length = self.length, self.length + key_states.shape[2] - num_over
        if self.length > first:
            self._reserve(self.length)
            self.key_buffer[:, :, first : self.length] = key_states[:, :, num_over:]
            self.value_buffer[:, :, first : self.length] = value_states[:, :, num_over:]
        return self.keys, self.values

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where heads hold some of `rows` (S,): heads, which of `rows`, and places, of one length each."""
        assert self.rows is not None, "a layer that holds all rows has them in their order"
        num_rows = int(torch.cat([self.rows.max()[None], rows]).max()) + 1 if self.rows.numel() else 0
        held = torch.arange(self.rows.shape[1], device=rows.device).expand_as(self.rows)
        place_of = torch.full((len(self.rows), num_rows), -1, device=rows.device).scatter_(1, self.rows, held)
        places = place_of[:, rows] if num_rows else place_of.new_empty((len(self.rows), 0))
        head, given = (places >= 0).nonzero(as_tuple=True)
        return head, given, places[head, given]

    def _reserve(self, capacity: int) -> None:
        """Room for `capacity` rows; grows by half so that decoding past the room reserved stays linear."""
        if capacity > self.key_buffer.shape[2]:
            capacity = max(capacity, self.key_buffer.shape[2] * 3 // 2)
            self.key_buffer = _grown(self.key_buffer, capacity)
            self.value_buffer = _grown(self.value_buffer, capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers exist from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    larger = buffer.new_empty((*buffer.shape[:2], capacity, buffer.shape[3]))
    larger[:, :, : buffer.shape[2]] = buffer
    return larger


class SplicedCache(Cache):
    """The KV cache of one sequence, with the token id and the position of each row.

    `spans` are the ranges of rows of the chunks, in context order; `exact` (T,) bool marks rows whose KV
    already equals that of a full prefill; `next_position` is where the next token goes, whatever rows were
    dropped. `side` holds data frozen when a row was made, with the rows on the last dimension: (T,) or (L,
    T).
    """

    layers: list[BufferLayer]  # type: ignore[assignment]

    def __init__(
        self,
        shapes: Sequence[KVShape],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        super().__init__(layers=[BufferLayer(shape, capacity, dtype, device) for shape in shapes])
        self.device = device
        self.token_ids = torch.empty(0, dtype=torch.int64, device=device)
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.exact = torch.empty(0, dtype=torch.bool, device=device)
        self.spans: list[range] = []
        self.next_position = 0
        self.side: dict[str, Tensor] = {}
        self._num_drops = 0

    # --- what it holds

    def keys(self, layer: int) -> Tensor:
        """(H, T, D), rotated to the rows' positions; a view."""
        return self.layers[layer].keys[0]

    def values(self, layer: int) -> Tensor:
        """(H, T, D); a view."""
        return self.layers[layer].values[0]

    def key_positions(self, layer: int) -> Tensor:
        """(T,), or (H, T) where the layer's heads hold different tokens."""
        rows = self.layers[layer].rows
        return self.positions if rows is None else self.positions[rows]

    @property
    def num_rows(self) -> int:
        """Rows ever announced; a layer that dropped some holds fewer."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values in use."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def check_holds(self, token_ids: Tensor) -> None:
        """Raises ``ValueError`` unless the cache holds exactly these tokens (T,), and nothing after them."""
        if not self.token_ids.cpu().equal(token_ids.cpu()):
            raise ValueError(
                f"the cache must hold the prompt's {len(token_ids)} context tokens and nothing after them, "
                f"it has {self.num_rows} rows; splice the prompt anew"
            )

    # --- how it changes

    def announce(self, token_ids: Tensor, positions: Tensor, *, exact: bool = False) -> range:
        """Records rows that are about to be appended, or written by `write`, and returns their range."""
        first = self.num_rows
        self.token_ids = torch.cat([self.token_ids, token_ids.to(self.device)])
        self.positions = torch.cat([self.positions, positions.to(self.device)])
        self.exact = torch.cat([self.exact, torch.full((len(token_ids),), exact, device=self.device)])
        if len(positions):
            self.next_position = max(self.next_position, int(positions[-1]) + 1)
            for layer in self.layers:
                if layer.rows is not None:
                    new = torch.arange(first, self.num_rows, device=self.device).expand(len(layer.rows), -1)
                    layer.rows = torch.cat([layer.rows, new], 1)
        return range(first, self.num_rows)

    def allocate(self) -> None:
        """Puts all rows announced so far in use, for `write` to fill."""
        for layer in self.layers:
            layer._reserve(self.num_rows)
            layer.length = self.num_rows

    def record(self, name: str, columns: Tensor) -> None:
        """Adds side data, (S,) or (L, S), of the last S rows; rows that nothing was recorded of have nan."""
        held = self.side.get(name, columns.new_empty((*columns.shape[:-1], 0)))
        missing = self.num_rows - columns.shape[-1] - held.shape[-1]
        gap = columns.new_full((*columns.shape[:-1], missing), torch.nan)
        self.side[name] = torch.cat([held, gap, columns], -1)

    def write(self, layer: int, rows: range, keys: Tensor, values: Tensor) -> None:
        """Fills announced rows of a layer with keys (H, T, D) rotated to their positions, and values (H, T,
        D).
        """
        held_keys, held_values = self.slot(layer, rows)
        held_keys.copy_(keys)
        held_values.copy_(values)

    def slot(self, layer: int, rows: range) -> tuple[Tensor, Tensor]:
        """Where announced rows of a layer lie, keys and values (H, T, D): views to fill."""
        held = self.layers[layer]
        return held.key_buffer[0, :, rows.start : rows.stop], held.value_buffer[0, :, rows.start : rows.stop]

    def write_places(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fills places (H, S) int64 of a layer's heads with keys (H, S, D) and values (H, S, D)."""
        heads = torch.arange(len(places), device=self.device)[:, None]
        self.layers[layer].key_buffer[0, heads, places] = keys
        self.layers[layer].value_buffer[0, heads, places] = values

    def write_held(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fills a layer with what it holds of the keys and values (H, T, D) of all rows."""
        rows = self.layers[layer].rows
        if rows is not None:
            keys, values = (x.gather(1, rows[..., None].expand(-1, -1, x.shape[2])) for x in (keys, values))
        self.write(layer, range(self.layers[layer].length), keys, values)

    def by_row(self, layer: int, data: Tensor) -> Tensor:
        """Data (H * G, ..., P) for the places of a layer's heads as (H * G, ..., T) for all rows; 0 where a
        head dropped one.
        """
        rows = self.layers[layer].rows
        if rows is None:
            return data
        rows = rows[:, : data.shape[-1]].repeat_interleave(len(data) // len(rows), 0)
        rows = rows.view(len(data), *[1] * (data.ndim - 2), -1).expand_as(data)
        return data.new_zeros((*data.shape[:-1], self.num_rows)).scatter_(-1, rows, data)

    @property
    def is_held(self) -> Tensor:
        """(T,) bool: whether any head of any layer still holds the row."""
        held = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        for layer in self.layers:
            held[slice(None) if layer.rows is None else layer.rows.flatten()] = True
        return held

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Overwrites and appends in one layer (see `BufferLayer.update`); called by the model's attention."""
        if key_states.shape[0] != 1:  # before anything is recorded
            raise ValueError(f"a SplicedCache holds one sequence, got a batch of {key_states.shape[0]}")
        if layer_idx == 0:
            self._announce_unknown(key_states.shape[2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _announce_unknown(self, num_given: int) -> None:
        """Records rows appended by a forward that kvloom did not run, such as `model.generate`."""
        layer = self.layers[0]
        num_over = 0 if layer.overwrite is None else len(layer.overwrite)
        held = self.num_rows if layer.rows is None else layer.rows.shape[1]
        num_new = layer.length + num_given - num_over - held
        if num_new > 0:
            ids = torch.full((num_new,), UNKNOWN_TOKEN, device=self.device)
            self.announce(ids, self.next_position + torch.arange(num_new, device=self.device))

    @contextmanager
    def overwriting(self, rows: Tensor) -> Iterator[None]:
        """Inside, the first len(rows) rows of a forward are written over `rows` (S,), in the heads that still
        hold them; further ones are appended.
        """
        for layer in self.layers:
            layer.overwrite = rows
        try:
            yield
        finally:
            for layer in self.layers:
                layer.overwrite = None

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, forwards may append; on leaving, the cache holds again exactly what it held before."""
        restore = self.checkpoint()
        try:
            yield
        finally:
            is_whole = restore()
            assert is_whole, "rows were dropped inside, they cannot be taken back"

    def checkpoint(self) -> Callable[[], bool]:
        """A function that takes back what was appended since; where rows were dropped since, it does nothing
        and returns False.
        """
        held = [(layer.length, layer.rows) for layer in self.layers]
        num_drops = self._num_drops
        record = (
            self.token_ids,
            self.positions,
            self.exact,
            self.next_position,
            list(self.spans),
            dict(self.side),
        )

        def restore() -> bool:
            if self._num_drops != num_drops:
                return False
            self.token_ids, self.positions, self.exact, self.next_position, self.spans, self.side = record
            for layer, (length, rows) in zip(self.layers, held, strict=True):
                layer.length, layer.rows = length, rows
            return True

        return restore

    def truncate(self, num_rows: int) -> None:
        """Forgets all rows from `num_rows` on. Raises ``ValueError`` where a layer dropped rows before."""
        if any(layer.rows is not None for layer in self.layers):
            raise ValueError("rows were dropped from this cache, so its end cannot be cut off")
        for layer in self.layers:
            layer.length = num_rows
        self.token_ids, self.positions = self.token_ids[:num_rows], self.positions[:num_rows]
        self.exact = self.exact[:num_rows]
        self.side = {name: columns[..., :num_rows] for name, columns in self.side.items()}
        self.next_position = int(self.positions.max()) + 1 if num_rows else 0

    def keep(self, layer: int, places: Tensor) -> None:
        """Drops all that a layer holds but `places`, (H, S) int64 or (1, S) for all heads, ascending; frees
        the memory.

        Keys keep their positions and `side` data stays with its rows. Raises ``ValueError`` for places out of
        range, out of order or repeated.
        """
        held = self.layers[layer]
        num_heads = held.key_buffer.shape[1]
        places = places.to(self.device).expand(num_heads, -1)
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < held.length:
            raise ValueError(f"layer {layer}: places to keep must lie in 0..{held.length - 1}")
        if (places.diff(dim=1) <= 0).any():
            raise ValueError(f"layer {layer}: places to keep must be ascending, without repeats")
        self._num_drops += 1
        held.rows = places.clone() if held.rows is None else held.rows.gather(1, places)
        index = places[None, :, :, None]
        held.key_buffer = held.keys.gather(2, index.expand(-1, -1, -1, held.key_buffer.shape[3]))
        held.value_buffer = held.values.gather(2, index.expand(-1, -1, -1, held.value_buffer.shape[3]))
        held.length = places.shape[1]

    # --- transformers

    def generate_kwargs(self, input_ids: Tensor) -> dict[str, Any]:
        """Arguments for `model.generate`: input_ids (1, Q) or (Q,) int64 are tokens that go on after this
        cache.

        What is generated is appended: a second call with the same cache goes on after the first answer.
        Raises ``ValueError`` for ids of another shape or type.
        """
        ids = input_ids[None] if input_ids.ndim == 1 else input_ids
        if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] == 0 or ids.dtype != torch.int64:
            raise ValueError(
                f"input_ids must be (1, Q) or (Q,) int64 with at least one token, got "
                f"{tuple(input_ids.shape)} "
                f"{input_ids.dtype}"
            )
        num_new = ids.shape[1]
        positions = self.next_position + torch.arange(num_new, device=self.device)
        ones = torch.ones((1, self.get_seq_length() + num_new), dtype=torch.long, device=self.device)
        return {
            "input_ids": ids.to(self.device),
            "position_ids": positions[None],
            "attention_mask": ones,
            CACHE_ARGUMENT: self,
        }

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "a SplicedCache holds one sequence whose rows belong to a context; splice a new one instead"
        )

    # What transformers' caches offer for batches, beams and rollback; it would break the record of rows here.
    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
