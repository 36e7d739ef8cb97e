"""Instructions: whether a response follows the verifiable instructions of IFEval (Zhou et al., 2023).

Written from the instructions' names and arguments, as they stand in the data, and not from anyone's code; so
figures may differ from the authors' where they split sentences by a trained model and guess languages by
another. Strict: the response is taken as it is. What cannot be checked is None, never a pass.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvloom.eval.languages import is_language, language_of, script_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[..., bool | None]

CHECKS: dict[str, Check] = {}
"""By id; each is given the response and the instruction's arguments by name."""

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SHORT = r"(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bvs)(?<!\betc)(?<!\be\.g)(?<!\bi\.e)(?<!P\.S)"
_SENTENCE_END = re.compile(_SHORT + r"[.!?…]+[\"'”’)\]*]*(?=\s|$)")  # noqa: RUF001
_WORD = r"\w+(?:['’-]\w+)*"  # noqa: RUF001


def follows(instruction: str, arguments: Mapping[str, Any], response: str) -> bool | None:
    """Whether the response follows the instruction of that id; None where there is no check for it, or it
    cannot be told. An empty response follows nothing.
    """
    check = CHECKS.get(instruction)
    if check is None:
        return None
    given = {name: value for name, value in arguments.items() if value is not None}
    return check(response, **given) if response.strip() else False


def _check(instruction: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[instruction] = function
        return function

    return register


def _holds(number: int, relation: str, wanted: int) -> bool:
    return number < wanted if relation == "less than" else number >= wanted


def _filled(parts: list[str]) -> list[str] | None:
    """The parts between separators, without empty ones at both ends; None where one in between is empty."""
    if parts and not parts[0].strip():
        parts = parts[1:]
    if parts and not parts[-1].strip():
        parts = parts[:-1]
    return parts if all(part.strip() for part in parts) else None


# --- words


@_check("keywords:existence")
def _existence(response: str, keywords: list[str]) -> bool:
    return all(word.lower() in response.lower() for word in keywords)


@_check("keywords:forbidden_words")
def _forbidden(response: str, forbidden_words: list[str]) -> bool:
    return not any(_whole(word).search(response) for word in forbidden_words)


def _whole(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)


@_check("keywords:frequency")
def _frequency(response: str, relation: str, keyword: str, frequency: int) -> bool:
    return _holds(response.lower().count(keyword.lower()), relation, frequency)


@_check("keywords:letter_frequency")
def _letters(response: str, let_relation: str, letter: str, let_frequency: int) -> bool:
    return _holds(response.lower().count(letter.lower()), let_relation, let_frequency)


@_check("length_constraints:number_words")
def _num_words(response: str, relation: str, num_words: int) -> bool:
    return _holds(len(re.findall(_WORD, response)), relation, num_words)


@_check("length_constraints:number_sentences")
def _num_sentences(response: str, relation: str, num_sentences: int) -> bool:
    return _holds(len(sentences(response)), relation, num_sentences)


def sentences(text: str) -> list[str]:
    """The text cut behind full stops, exclamation and question marks that a blank follows; what stands
    behind the last one is a sentence too, if it has a letter or digit.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [part.strip() for part in parts if re.search(r"\w", part)]


# --- paragraphs and sections


@_check("length_constraints:number_paragraphs")
def _num_paragraphs(response: str, num_paragraphs: int) -> bool:
    parts = _filled(re.split(r"(?<!\*)\*\*\*(?!\*)", response))
    return parts is not None and len(parts) == num_paragraphs


@_check("length_constraints:nth_paragraph_first_word")
def _first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part for part in re.split(r"\n\n", response) if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = re.findall(_WORD, parts[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower()


@_check("detectable_format:multiple_sections")
def _sections(response: str, section_spliter: str, num_sections: int) -> bool:
    found = re.findall(rf"(?<!\w){re.escape(section_spliter)}\s?\d+", response)
    return len(found) >= num_sections


@_check("combination:two_responses")
def _two_responses(response: str) -> bool:
    parts = _filled(re.split(r"(?<!\*)\*{6}(?!\*)", response))
    return parts is not None and len(parts) == 2 and parts[0].strip() != parts[1].strip()


@_check("combination:repeat_prompt")
def _repeat(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


# --- formats


@_check("detectable_format:number_bullet_lists")
def _bullets(response: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))\s*\S", response, re.MULTILINE)) == num_bullets


@_check("detectable_format:number_highlighted_sections")
def _highlights(response: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", response)
    return sum(bool((bold or plain).strip()) for bold, plain in found) >= num_highlights


@_check("detectable_format:title")
def _title(response: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", response))


@_check("detectable_format:json_format")
def _json(response: str) -> bool:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@_check("detectable_format:constrained_response")
def _constrained(response: str) -> bool:
    return any(answer in response for answer in ANSWERS)


@_check("detectable_content:number_placeholders")
def _placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", response)) >= num_placeholders


@_check("detectable_content:postscript")
def _postscript(response: str, postscript_marker: str) -> bool:
    """Blanks may stand between the letters: ``P. S.``."""
    letters = re.findall(r"\w", postscript_marker)
    marker = r"\.\s?".join(map(re.escape, letters))
    return re.search(rf"(?<![\w.]){marker}\b", response, re.IGNORECASE) is not None


@_check("startend:end_checker")
def _end(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_check("startend:quotation")
def _quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


@_check("punctuation:no_comma")
def _no_comma(response: str) -> bool:
    return "," not in response


# --- case and language


@_check("change_case:english_capital")
def _capital(response: str) -> bool:
    return response.isupper() and _is_english(response)


@_check("change_case:english_lowercase")
def _lowercase(response: str) -> bool:
    return response.islower() and _is_english(response)


def _is_english(text: str) -> bool:
    """English, or in Latin letters and too short to be told from it."""
    return language_of(text) in ("en", None) and script_of(text) == "LATIN"


@_check("change_case:capital_word_frequency")
def _capital_words(response: str, capital_relation: str, capital_frequency: int) -> bool:
    words = re.findall(_WORD, response)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


@_check("language:response_language")
def _language(response: str, language: str) -> bool | None:
    return is_language(response, language)
