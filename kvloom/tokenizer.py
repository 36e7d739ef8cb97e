"""Tokenizer: text <-> token ids, around any tokenizer object, without surprises in document text.

A fast tokenizer of transformers is not called for encoding: its own switch (`split_special_tokens`) lives in
state shared between threads, and lets control tokens not flagged special pass (``<think>`` of Qwen3).
Private copies of its definition encode instead. Other objects are called as they are.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvloom.errors import PromptError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Mapping

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer object (any with `encode`, `decode` and the special-token ids) with kvloom's verbs.

    Raises ``TypeError`` when `tokenizer` cannot encode and decode.
    """

    def __init__(self, tokenizer: Any) -> None:
        for verb in ("encode", "decode"):
            if not callable(getattr(tokenizer, verb, None)):
                raise TypeError(
                    f"a tokenizer needs encode and decode, {type(tokenizer).__name__} has no {verb}"
                )
        self.raw = tokenizer
        self._encode_keywords = _keywords(tokenizer.encode)
        self._decode_keywords = _keywords(tokenizer.decode)
        self._is_fast = hasattr(getattr(tokenizer, "backend_tokenizer", None), "to_str")
        self._backends: dict[tuple[bool, bool], Any] = {}

    def encode(self, text: str, *, special: bool = False, first: bool = False) -> list[int]:
        """The ids of `text`, with nothing added in front or behind.

        With `special`, special tokens written in `text` become control tokens; without, none does. `first`
        says that `text` begins the whole sequence: only there SentencePiece tokenizers put a blank in front.
        """
        ids = self._encode(text, special, first)
        if not special and not self.control_ids.isdisjoint(ids):
            # the vocabulary itself spells a control token (Unigram, WordLevel): only cutting it in two helps
            pieces = _cut_inside(text, self._control)
            ids = [token_id for piece in pieces for token_id in self._encode(piece, special, first)]
        return ids

    def _encode(self, text: str, special: bool, first: bool) -> list[int]:
        if self._is_fast:
            return self._backend(special, first).encode(text, add_special_tokens=False).ids
        keywords: dict[str, Any] = {}
        if "add_special_tokens" in self._encode_keywords:
            keywords["add_special_tokens"] = False
        if "split_special_tokens" in self._encode_keywords or hasattr(self.raw, "split_special_tokens"):
            keywords["split_special_tokens"] = not special
        ids = [int(token_id) for token_id in self.raw.encode(text, **keywords)]
        if "add_special_tokens" not in keywords and not special:
            # such a tokenizer can only add its BOS and EOS always or never; plain text holds neither
            ids = ids[1:] if ids and ids[0] == self.bos_id else ids
            ids = ids[:-1] if ids and ids[-1] in self.eos_ids else ids
        return ids

    def _backend(self, special: bool, first: bool) -> Any:
        first = first and self._has_leading_blank
        if (special, first) not in self._backends:
            from tokenizers import Tokenizer as Backend

            definition = self._definition if first else _drop_leading_blank(self._definition)
            control = set() if special else set(self._control)
            added = [
                {**token, "special": token["special"] or token["content"] in control}
                for token in definition["added_tokens"]
            ]
            backend = Backend.from_str(json.dumps({**definition, "added_tokens": added}))
            backend.encode_special_tokens = not special
            self._backends[special, first] = backend
        return self._backends[special, first]

    @cached_property
    def _definition(self) -> dict[str, Any]:
        definition = json.loads(self.raw.backend_tokenizer.to_str())
        return {**definition, "truncation": None, "padding": None}

    @cached_property
    def _has_leading_blank(self) -> bool:
        return _drop_leading_blank(self._definition) != self._definition

    @cached_property
    def _control(self) -> dict[str, int]:
        """Text -> id of every added token that steers the model rather than abbreviates text."""
        template = json.dumps(getattr(self.raw, "chat_template", None) or "", ensure_ascii=False)
        return {
            token.content: token_id
            for token_id, token in getattr(self.raw, "added_tokens_decoder", {}).items()
            if token.special
            or (token.content.startswith("<|") and token.content.endswith("|>"))
            or (not token.content.isspace() and token.content in template)
        }

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that no document or question text is ever encoded to."""
        return frozenset(self._control.values())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless told otherwise."""
        added = getattr(self.raw, "added_tokens_decoder", {}).items()
        known = getattr(self.raw, "all_special_ids", ())
        own = {token_id for token_id in (self.bos_id, *self.eos_ids) if token_id is not None}
        return frozenset({token_id for token_id, token in added if token.special} | set(known) | own)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, blanks as they are; special tokens are spelled out without `skip_special`."""
        ids = [int(token_id) for token_id in ids]
        if skip_special:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        keywords = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
        return self.raw.decode(
            ids, **{key: keywords[key] for key in keywords if key in self._decode_keywords}
        )

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.raw, "chat_template", None)) and hasattr(self.raw, "apply_chat_template")

    def render(
        self, messages: list[dict[str, str]], *, today: datetime.date | None = None, **kwargs: Any
    ) -> str:
        """The text of the chat template for `messages`, up to where the assistant's answer begins.

        A template asking for the date is told `today`, or the clock's. Raises ``PromptError`` when there is
        no template, or when it refuses the messages.
        """
        if not self.has_template:
            raise PromptError(f"the tokenizer {type(self.raw).__name__} has no chat template")
        keywords = _keywords(self.raw.apply_chat_template)
        accepted = {key: value for key, value in kwargs.items() if key in keywords or _ANY in keywords}
        try:
            if today is not None and "chat_template" in keywords:
                template = self.raw.get_chat_template()
                if "strftime_now" in template:
                    accepted["chat_template"] = _date_macro(today) + template
            return self.raw.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **accepted
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            reason = str(error) or type(error).__name__
            raise PromptError(f"the chat template refuses the messages: {reason}") from error

    @property
    def bos_id(self) -> int | None:
        return getattr(self.raw, "bos_token_id", None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        eos = getattr(self.raw, "eos_token_id", None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @cached_property
    def _identity(self) -> str:
        special = {"bos": self.bos_id, "eos": self.eos_ids}
        name = type(self.raw).__name__
        if self._is_fast:
            definition: Any = self._definition
        elif hasattr(self.raw, "get_vocab"):
            definition = {"class": name, "vocab": self.raw.get_vocab(), "special": sorted(self.special_ids)}
        else:
            size = getattr(self.raw, "vocab_size", None)
            definition = {"class": name, "size": size, "special": sorted(self.special_ids)}
        text = json.dumps([definition, special], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def identity(self) -> str:
        """A SHA-256 of all that decides token ids: vocabulary, rules, added tokens; not the chat template."""
        return self._identity


class StreamDecoder:
    """Token ids in, text out as soon as it is final; the pieces joined are the `decode` of all ids.

    Only the last few ids are decoded again for each new one, so the cost grows as the text does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._to_tokens: Callable[[list[int]], list[str]] | None = getattr(
            tokenizer.raw, "convert_ids_to_tokens", None
        )
        self._reset([], 0)

    def _reset(self, context: list[int], sent: int) -> None:
        self._ids = context  # the last ids already shown, then those still open
        self._num_shown = len(context)
        self._sent = sent  # characters of decode(_ids) already shown
        self._decode_at = 0  # decode again when this many ids have come

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text that `ids` make final; empty while a character is incomplete."""
        return "".join(self._feed(token_id) for token_id in ([ids] if isinstance(ids, int) else ids))

    def _feed(self, token_id: int) -> str:
        token_id = int(token_id)
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        self._ids.append(token_id)
        if self._to_tokens is not None and _BYTE_TOKEN.fullmatch(self._to_tokens([token_id])[0] or ""):
            return ""  # a later byte can still change how the whole run of bytes decodes
        if len(self._ids) < self._decode_at and self._is_open(self._decode([token_id])):
            return ""
        text = self._decode(self._ids)
        final = text.removesuffix(_REPLACEMENT)  # perhaps the first bytes of a character
        delta = final[self._sent :]
        self._sent = max(self._sent, len(final))
        if delta and final == text:
            context = self._ids[self._num_shown :]
            self._reset(context, len(self._decode(context)))
        elif len(self._ids) - self._num_shown > 16:
            self._decode_at = 2 * len(self._ids)
        return delta

    def flush(self) -> str:
        """The text still held back, as `decode` shows it; the decoder is then new."""
        delta = self._decode(self._ids)[self._sent :]
        self._reset([], 0)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)

    @staticmethod
    def _is_open(text: str) -> bool:
        return not text or _REPLACEMENT in text


_ANY = "**"


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """The names `function` can be called with, and ``**`` when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C without a signature
        return frozenset()
    return frozenset(
        _ANY if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters
    )


def _date_macro(today: datetime.date) -> str:
    """Jinja that shadows transformers' `strftime_now`, which a variable of that name cannot."""
    directives = ["%" + letter for letter in "aAbBdmyYHIMSpjUWuwxXcDFTeZz"]
    steps = {directive: today.strftime(directive) for directive in directives}
    steps |= {"%-d": str(today.day), "%-m": str(today.month)}
    body = "".join(f" | replace({directive!r}, {text!r})" for directive, text in steps.items())
    return "{%- macro strftime_now(format) -%}{{ format" + body + " }}{%- endmacro %}\n"


def _drop_leading_blank(definition: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a fast tokenizer's definition that puts no blank in front of the text."""
    definition = dict(definition)
    for part, members in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        steps = copy.deepcopy(definition.get(part))
        if steps is None:
            continue
        kept = []
        for step in steps[members] if steps["type"] == "Sequence" else [steps]:
            if step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
            elif step["type"] == "ByteLevel":
                step["add_prefix_space"] = False
            elif step["type"] == "Prepend":
                continue
            kept.append(step)
        definition[part] = (
            {"type": "Sequence", members: kept} if steps["type"] == "Sequence" or not kept else kept[0]
        )
    return definition


def _cut_inside(text: str, tokens: Iterable[str]) -> list[str]:
    """`text` in pieces, none of which holds one of `tokens` whole."""
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    if not longest_first:
        return [text]
    ends = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, longest_first)), text)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True)]
