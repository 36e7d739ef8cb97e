"""The turns of a conversation as token ids, by the tokenizer's chat template.

As in a prompt over documents, the user's own text is tokenized apart from the template's, so that what looks
like a special token in it is text.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.errors import PromptError
from kvloom.prompt import PromptFormat, is_unicode

if TYPE_CHECKING:
    from kvloom.tokenizer import Tokenizer

_USER, _ASSISTANT = "kvloomusertext", "kvloomassistanttext"


def turn_ids(tokenizer: Tokenizer, format: PromptFormat, text: str, *, is_first: bool) -> Tensor:
    """(T,) int64: a user's turn, up to where the answer begins; a later one begins where the answer before
    ended.

    Without a chat template, or with ``chat=False``, the text alone, behind the BOS token if it is the first.
    Raises ``PromptError`` for an empty text and a template that does not show the text once.
    """
    if not isinstance(text, str) or not text.strip():
        raise PromptError("the prompt is empty; write something")
    if not is_unicode(text):
        raise PromptError("the prompt holds half a character (a lone surrogate); write it in UTF-8")
    if not (format.chat and tokenizer.has_template):
        bos = [tokenizer.bos_id] if is_first and tokenizer.bos_id is not None else []
        return torch.tensor(bos + tokenizer.encode(text), dtype=torch.int64)
    before, after = _frame(tokenizer, format, is_first)
    ids = tokenizer.encode(before, special=True, first=is_first) + tokenizer.encode(text)
    return torch.tensor(ids + tokenizer.encode(after, special=True), dtype=torch.int64)


def _frame(tokenizer: Tokenizer, format: PromptFormat, is_first: bool) -> tuple[str, str]:
    """The template's text before and after the user's."""
    messages = [{"role": "user", "content": _USER}]
    if not is_first:
        earlier = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ASSISTANT}]
        messages = earlier + messages
    if format.system:
        messages = [{"role": "system", "content": format.system}, *messages]
    rendered = tokenizer.render(
        messages,
        enable_thinking=format.thinking,
        thinking=format.thinking,
        today=date.fromisoformat(format.date),
    )
    if not is_first:
        rendered = rendered.partition(_ASSISTANT)[2]
    before, found, after = rendered.partition(_USER)
    if not found or _USER in after:
        raise PromptError(
            "the chat template does not show the user's text once and unchanged; use "
            "PromptFormat(chat=False), or another template"
        )
    return before, after
