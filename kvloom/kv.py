"""ChunkKV: the KV cache of one chunk, immutable, and the shape letters used everywhere.

L layers, H kv heads, G query heads per kv head, T context tokens, Q question tokens, S selected rows,
D head dim, V vocabulary. There is no batch letter: the core holds one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """The keys and values of one chunk, as computed at positions ``start .. start + T - 1``.

    Keys are rotated (after RoPE) for those positions; `kvloom.splice` moves them. Heads and head dim may
    differ between layers, and between keys and values. `rows` says which tokens the heads of a layer hold
    where a compressor dropped some, and `compressor` which one it was; None: all tokens, in every layer.
    Raises ``ValueError`` for tensors that do not fit each other.
    """

    token_ids: Tensor  # (T,) int64
    keys: tuple[Tensor, ...]  # L x (H, T, D), rotated for start .. start + T - 1
    values: tuple[Tensor, ...]  # L x (H, T, D)
    fingerprint: str  # of the model that computed it; see `kvloom.hf.Model.fingerprint`
    start: int = 0  # position of the first token
    rows: tuple[Tensor, ...] | None = None  # L x (H, T) int32, ascending, 0..number of tokens - 1
    compressor: str = ""  # repr of what dropped the others

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))
        object.__setattr__(self, "values", tuple(self.values))
        if self.token_ids.ndim != 1:
            raise ValueError(f"token_ids must be one-dimensional, got shape {tuple(self.token_ids.shape)}")
        if self.token_ids.dtype != torch.int64:
            raise ValueError(f"token_ids must be torch.int64, got {self.token_ids.dtype}")
        if len(self.keys) != len(self.values):
            raise ValueError(f"{len(self.keys)} layers of keys but {len(self.values)} layers of values")
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")
        if self.rows is not None:
            object.__setattr__(self, "rows", tuple(self.rows))
            self._check_rows(self.rows)
        for name, tensors in (("keys", self.keys), ("values", self.values)):
            for layer, tensor in enumerate(tensors):
                num_held = len(self.token_ids) if self.rows is None else self.rows[layer].shape[1]
                if tensor.ndim != 3 or tensor.shape[1] != num_held:
                    raise ValueError(
                        f"layer {layer}: {name} {tuple(tensor.shape)} should be "
                        f"(heads, {num_held}, head_dim); delete the chunk and compute it again"
                    )

    def _check_rows(self, rows: tuple[Tensor, ...]) -> None:
        if len(rows) != len(self.keys):
            raise ValueError(f"{len(self.keys)} layers of keys but {len(rows)} layers of rows")
        for layer, held in enumerate(rows):
            num_heads = self.keys[layer].shape[0]
            if held.ndim != 2 or len(held) != num_heads or held.dtype != torch.int32:
                raise ValueError(
                    f"layer {layer}: rows {tuple(held.shape)} {held.dtype} should be "
                    f"({num_heads}, tokens held) torch.int32"
                )
            is_within = held.numel() == 0 or 0 <= int(held.min()) <= int(held.max()) < len(self.token_ids)
            if not is_within or (held.diff(dim=1) <= 0).any():
                raise ValueError(f"layer {layer}: rows must ascend within 0..{len(self.token_ids) - 1}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values, token ids and rows."""
        return sum(tensor.nbytes for tensor in (self.token_ids, *self.keys, *self.values, *(self.rows or ())))
