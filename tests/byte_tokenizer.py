"""ByteTokenizer: a tokenizer as small as they get. Ids are UTF-8 bytes, special tokens follow from 256."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class ByteTokenizer:
    """Ids 0..255 are bytes; 256, 257, ... are BOS, EOS, then the others. Decoding replaces bad bytes."""

    def __init__(
        self,
        chat_template: str | None = None,
        *,
        bos_token: str | None = "<s>",
        eos_token: str | None = "</s>",
        special_tokens: Iterable[str] = ("<|im_start|>", "<|im_end|>"),
    ) -> None:
        names = [token for token in (bos_token, eos_token) if token is not None] + list(special_tokens)
        self.special_tokens = {token: 256 + place for place, token in enumerate(names)}
        self._names = {token_id: token for token, token_id in self.special_tokens.items()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
        self.bos_token, self.eos_token = bos_token, eos_token
        self.bos_token_id = None if bos_token is None else self.special_tokens[bos_token]
        self.eos_token_id = None if eos_token is None else self.special_tokens[eos_token]
        self.all_special_ids = list(self.special_tokens.values())
        self.vocab_size = 256 + len(names)
        self.chat_template = chat_template

    def __len__(self) -> int:
        return self.vocab_size

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        ids = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        if split_special_tokens:
            return ids + list(text.encode())
        end = 0
        for match in self._pattern.finditer(text):
            ids += [*text[end : match.start()].encode(), self.special_tokens[match.group()]]
            end = match.end()
        return ids + list(text[end:].encode())

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        ids = self.encode(text, **kwargs)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        parts = []
        for token_id in map(int, ids):
            if token_id < 256:
                parts.append(bytes([token_id]))
            elif not skip_special_tokens:
                parts.append(self._names[token_id].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        import jinja2

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = raise_exception
        assert self.chat_template is not None, "this ByteTokenizer has no chat template"
        text = environment.from_string(self.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
