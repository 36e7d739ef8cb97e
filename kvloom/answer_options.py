"""How an answer may be asked for: the options of `Loom.answer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvloom.generate import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvloom.compressors import Compressor
    from kvloom.selectors import Selector

Reorder = bool | Literal["chunks"]


class AnswerOptions(SamplingOptions, total=False):
    """How an answer comes about.

    `selector` is an instance, or a name with `options` as data. `reorder=True` puts the documents that the
    question attends to most next to it; "chunks" does so with the chunks of each document too, which breaks
    up their text. A `compressor` drops rows of the prompt before the answer; over reused chunks it must be
    one that needs no signals of them, such as snapkv.
    """

    selector: Selector | str
    options: Mapping[str, Any] | None
    reorder: Reorder
    compressor: Compressor | str | None
