"""The attention function that kvloom registers with transformers, and its mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvloom.attention import Heads, Plan, attend, attend_last

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION = "kvloom"
"""Name under which the attention function and its mask are registered with transformers."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kvloom: Plan | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: follows the plan of a kvloom forward, else is ordinary causal
    attention.
    """
    heads = Heads(query.shape[-1] ** -0.5 if scaling is None else scaling, s_aux, softcap)
    if kvloom is not None:
        output = kvloom.attend(module.layer_idx, query[0], key[0], value[0], heads)[None]  # type: ignore[arg-type]
    elif attention_mask is None:
        output = torch.stack([attend_last(*qkv, heads) for qkv in zip(query, key, value, strict=True)])
    else:
        masks = attention_mask.expand(len(query), -1, -1, -1)[:, 0, :, : key.shape[2]]
        output = torch.stack([attend(*qkvm, heads) for qkvm in zip(query, key, value, masks, strict=True)])
    return output.transpose(1, 2).contiguous(), None


def _mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Tensor | None:
    """No mask where the queries are the last tokens and nothing is padding: `attend_last` needs none."""
    if (
        (attention_mask is None or bool(attention_mask.all()))
        and kv_offset == 0
        and q_offset + q_length == kv_length
    ):
        return None
    rest["allow_is_causal_skip"] = False
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        **rest,
    )


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
