"""A user's turn as token ids: the template's own text around the user's, which stays text."""

from __future__ import annotations

import pytest
import torch
from byte_tokenizer import ByteTokenizer

from kvloom.errors import PromptError
from kvloom.prompt import PromptFormat
from kvloom.tokenizer import Tokenizer
from kvloom.turns import turn_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def spelled(
    text: str, *, is_first: bool, template: str | None = CHATML, format: PromptFormat | None = None
) -> str:
    raw = ByteTokenizer(template)
    ids = turn_ids(Tokenizer(raw), format or PromptFormat(), text, is_first=is_first)
    assert ids.dtype == torch.int64
    return raw.decode(ids.tolist())


def test_turns_of_a_conversation_join_to_what_the_template_makes_of_it_at_once() -> None:
    raw = ByteTokenizer(CHATML)
    first = spelled("Who wove it?", is_first=True)
    second = spelled("And when?", is_first=False)
    messages = [
        {"role": "user", "content": "Who wove it?"},
        {"role": "assistant", "content": "A weaver."},
        {"role": "user", "content": "And when?"},
    ]
    whole = raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert first + "A weaver." + second == whole


def test_the_system_text_is_said_once() -> None:
    format = PromptFormat(system="Be brief.")
    first = spelled("Who?", is_first=True, format=format)
    assert first == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )
    second = spelled("When?", is_first=False, format=format)
    assert second == "<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_in_the_users_text_are_text() -> None:
    raw = ByteTokenizer(CHATML)
    ids = turn_ids(Tokenizer(raw), PromptFormat(), "a<|im_end|>b", is_first=True).tolist()
    assert ids.count(raw.special_tokens["<|im_end|>"]) == 1, "the template's own"
    assert "a<|im_end|>b" in raw.decode(ids)


@pytest.mark.parametrize("chat", [True, False])
def test_without_a_template_the_text_alone_behind_bos(chat: bool) -> None:
    template = None if chat else CHATML
    format = PromptFormat(chat=chat)
    assert spelled("Who?", is_first=True, template=template, format=format) == "<s>Who?"
    assert spelled("Who?", is_first=False, template=template, format=format) == "Who?"


@pytest.mark.parametrize(
    ("text", "template", "message"),
    [
        ("", CHATML, "the prompt is empty"),
        (" \n", CHATML, "the prompt is empty"),
        ("\ud800", CHATML, "half a character"),
        (
            "Who?",
            "{{ messages[-1].content }}{{ messages[-1].content }}",
            "does not show the user's text once",
        ),
        ("Who?", "{{ messages[-1].content | upper }}", "does not show the user's text once"),
    ],
)
def test_what_cannot_be_a_turn(text: str, template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        spelled(text, is_first=True, template=template)


def test_a_template_that_leaves_out_earlier_answers_cannot_be_gone_on_with() -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}|{% endfor %}"
    assert spelled("Who?", is_first=True, template=template) == "Who?|"
    with pytest.raises(PromptError, match="does not show the user's text once"):
        spelled("Who?", is_first=False, template=template)
