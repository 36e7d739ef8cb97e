"""Each instruction of IFEval on a response that follows it and one that does not, judged by eye."""

# ruff: noqa: RUF001  words of other scripts

from __future__ import annotations

from typing import Any

import pytest

from kvloom.eval.instructions import CHECKS, follows, sentences
from kvloom.eval.languages import is_language, language_of

LESS, MORE = {"relation": "less than"}, {"relation": "at least"}

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["mom", "Mother"]}, "My MOM, a mother.", "My mom."),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "ride"]}, "Candles, rides.", "Yes we CAN!"),
    ("keywords:frequency", {**MORE, "keyword": "tea", "frequency": 2}, "Tea, then tea.", "Tea only."),
    ("keywords:frequency", {**LESS, "keyword": "tea", "frequency": 2}, "Tea only.", "Tea, then tea."),
    (
        "keywords:letter_frequency",
        {"let_relation": "at least", "letter": "q", "let_frequency": 2},
        "Quick quiz",
        "quick",
    ),
    (
        "keywords:letter_frequency",
        {"let_relation": "less than", "letter": "Q", "let_frequency": 2},
        "quick",
        "Quick quiz",
    ),
    ("length_constraints:number_words", {**MORE, "num_words": 4}, "It's a well-made thing", "It's well-made"),
    ("length_constraints:number_words", {**LESS, "num_words": 3}, "two words", "three words here"),
    (
        "length_constraints:number_sentences",
        {**MORE, "num_sentences": 3},
        "One. Two! Three?",
        "Mr. A paid 3.5 dollars. Two.",
    ),
    ("length_constraints:number_sentences", {**LESS, "num_sentences": 2}, "No end here", "One. And two"),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "***\nOne\n***\nTwo, with **bold**\n***",
        "One\n***\n\n***\nTwo",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "jasper"},
        'One.\n\n"Jasper" is a name.',
        "Jasper one.\n\nTwo.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "one"},
        "One.\n\n\n\nTwo.",
        "One.\n\nTwo.\n\nThree.",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 a\nSECTION 2 b",
        "SECTION 1 a, SUBSECTION 2",
    ),
    ("combination:two_responses", {}, "One\n******\nTwo", "One\n******\nOne"),
    ("combination:two_responses", {}, "******\nOne\n******\nTwo", "One\n*******\nTwo"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, " say it. Well.", "Well. Say it."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b\n**c**", "* a\n* b\n* c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* **"),
    ("detectable_format:title", {}, "<<A song>>\nla", "<< >>\nla"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, 2]}\n```', "{'a': 1}"),
    ("detectable_format:constrained_response", {}, "So: My answer is no.", "My answer is none"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [city]", "[name] []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\n**P. S.** more", "Bye. P.P.S. x"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. more", "Bye.\nP.S. more"),
    ("startend:end_checker", {"end_phrase": "Any help? "}, 'I did. any HELP?" ', "Any help? No."),
    ("startend:quotation", {}, ' "All of it" ', '"'),
    ("punctuation:no_comma", {}, "None; here", "One, here"),
    ("change_case:english_capital", {}, "THE DOG, 2 OF THEM", "THE DOg"),
    ("change_case:english_capital", {}, "CRUISING", "ЭТО И НЕ ТО"),
    ("change_case:english_lowercase", {}, "the dog is in", "der hund ist nicht da und das ist es"),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "A BIG Dog",
        "BIG Dog",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "less than", "capital_frequency": 2},
        "BIG Dog",
        "A BIG Dog",
    ),
    ("language:response_language", {"language": "hi"}, "यह एक परीक्षण है और कुछ नहीं", "This is a test of it"),
    ("language:response_language", {"language": "de"}, "Das ist ein Text und er ist gut", "This is it"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_followed_or_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert follows(name, arguments, good) is True
    assert follows(name, {**arguments, "another_argument": None}, bad) is False
    assert follows(name, arguments, " \n") is False, "an empty response follows nothing"


def test_every_check_has_its_case_and_what_has_no_check_is_not_passed() -> None:
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert follows("keywords:rhymes", {"word": "tea"}, "sea") is None
    assert follows("language:response_language", {"language": "is"}, "Halló heimur") is None
    assert follows("language:response_language", {"language": "de"}, "Hm") is None, "too short to tell"
    assert follows("language:response_language", {"language": "ru"}, "Hm") is False, "another script"


def test_sentences_end_where_a_blank_follows() -> None:
    text = 'Dr. Smith went, e.g. to Paris, 3.5 km. Really?! "Yes." he said... ok\n\n---'
    assert sentences(text) == [
        "Dr. Smith went, e.g. to Paris, 3.5 km.",
        "Really?!",
        '"Yes."',
        "he said...",
        "ok\n\n---",
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Il est dans la maison et ne sort pas", "fr"),
        ("Los perros no son una molestia para el vecino", "es"),
        ("O gato não é um cão, mas os dois são bons", "pt"),
        ("Это текст на русском, и он не длинный", "ru"),
        ("Це текст і він не довгий, але та мова", "uk"),
        ("ਇਹ ਪੰਜਾਬੀ ਹੈ", "pa"),
        ("これは日本語の文です", "ja"),
        ("这是中文", "zh"),
        ("이것은 한국어입니다", "ko"),
        ("یہ اردو ہے اور اس میں کچھ نہیں", "ur"),
        ("این متن به فارسی است و از آن", "fa"),
        ("12, 34!", None),
        ("Zebra", None),
    ],
)
def test_the_language_of_a_text(text: str, code: str | None) -> None:
    assert language_of(text) == code
    if code:
        assert is_language(text, code)
        assert not is_language(text, "en")
