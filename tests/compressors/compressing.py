"""Compression driven step by step, for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plain_forward import rows_left, sets

from kvloom.compressors import as_compressor
from kvloom.conversation import Conversation

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.compressors import Compression, Compressor
    from kvloom.loom import Loom


def prefilled(loom: Loom, ids: Tensor, compressor: Compressor, **others: Any) -> Conversation:
    """A conversation whose prompt is computed and not compressed yet."""
    talk = Conversation(loom.decoder, compressor=compressor, **others)
    talk.prefill(ids)
    return talk


def compressed(
    loom: Loom, ids: Tensor, compressor: Compressor | str, **options: Any
) -> tuple[Conversation, Compression]:
    talk = prefilled(loom, ids, as_compressor(compressor, options or None))
    done = talk.compress()
    assert done is not None
    return talk, done


def kept(loom: Loom, ids: Tensor, compressor: Compressor | str, **options: Any) -> list[list[list[int]]]:
    """The rows kept of a prompt, by layer and head."""
    return sets(rows_left(compressed(loom, ids, compressor, **options)[0].cache))
