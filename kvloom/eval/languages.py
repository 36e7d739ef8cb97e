"""Languages: which one a text is in, by its script and, where several share one, by its commonest words.

A text without such words, and a language that is not listed, cannot be told: the answer is then None and
never a guess.
"""

# ruff: noqa: RUF001  words of other scripts, whose letters look like Latin ones

from __future__ import annotations

import unicodedata
from collections import Counter

SCRIPTS = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "THAI": "th",
    "HEBREW": "he",
    "GREEK": "el",
    "BENGALI": "bn",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
}
"""Scripts that one of the languages asked for is written in alone, as Unicode calls them."""

WORDS = {
    "LATIN": {
        "en": "the and of to is in that it was for with as on are this be by not you have from",
        "de": "der die und das ist nicht den ein eine zu mit sich von auf für dem des im wird auch",
        "fr": "le les et des est une dans que pour qui pas sur du avec ce il au sont plus nous",
        "es": "el los y las es una que para por con del se su como más lo pero son al está",
        "pt": "os e uma que não para com do da em um mais dos como são foi ao das seu também",
        "it": "il di che è la per una non con sono del gli della nel anche più alla ma questo dei",
        "pl": "i w nie na się jest że z do to jak są przez od dla po oraz ale przy jego",
        "fi": "ja on ei se että oli ovat mutta hän kun myös joka mitä niin tämä olla kuin voi sitä jos",
        "vi": "và của là có không được cho một các trong người với này để những đã khi từ về như",
        "sw": "na ya wa kwa ni katika za la kuwa hii yake au kama cha lakini hiyo watu sana pia kila",
    },
    "CYRILLIC": {
        "ru": "и в не на что он с как это по но из у за от так для же все был она его быть или",
        "uk": "і в не на що він з як це та але із у за від так для ж всі був вона його є або до",
        "bg": "и в не на че той с как това по но от за се да са е като при също има съм ще който",
    },
    "DEVANAGARI": {
        "hi": "है और के का की में से को यह हैं पर ने एक नहीं भी कि था हो लिए तो",
        "mr": "आहे आणि हे या ते एक नाही मी तो ती व आहेत होते करून साठी मध्ये पण काही त्या केले",
        "ne": "छ र को मा यो हो छन् लाई पनि गर्न भएको एक तथा हुन् थियो गरेको तर भने छैन बाट",
    },
    "ARABIC": {
        "ar": "في من على أن إلى هذا التي عن مع ما لا كان هذه الذي هو كل بين ذلك بعد أو",
        "fa": "و در به از که این را است با برای آن یک هم خود تا شد می بود بر شده",
        "ur": "کے کی میں ہے اور سے کا کو کہ نے پر یہ ہیں اس ایک بھی نہیں تھا ہو گیا",
    },
}
"""The commonest words of languages that share a script."""


def script_of(text: str) -> str | None:
    """The script of most of the text's letters, as Unicode calls it; None without letters."""
    counts = Counter(unicodedata.name(letter, "?").partition(" ")[0] for letter in text if letter.isalpha())
    return counts.most_common(1)[0][0] if counts else None


def language_of(text: str) -> str | None:
    """The two-letter code of the text's language, or None where it cannot be told."""
    script = script_of(text)
    if script == "CJK":  # Japanese is written with it too, and then has kana beside it
        has_kana = any(unicodedata.name(letter, "?").startswith(("HIRA", "KATA")) for letter in text)
        return "ja" if has_kana else "zh"
    if script not in WORDS:
        return SCRIPTS.get(script or "")
    words = Counter(word.strip(_MARKS) for word in text.lower().split())
    found = {code: sum(words[word] for word in set(common.split())) for code, common in WORDS[script].items()}
    best, second = sorted(found.values(), reverse=True)[:2]
    return max(found, key=lambda code: found[code]) if best > second else None


def is_language(text: str, code: str) -> bool | None:
    """Whether the text is in the language of that code; None where this cannot be told."""
    found = language_of(text)
    if found is not None:
        return found == code
    script = script_of(text)
    writes = {name for name, words in WORDS.items() if code in words}
    writes |= {name for name, only in SCRIPTS.items() if only == code}
    return None if script in writes or not writes else False


_MARKS = ".,;:!?\"'()[]{}*_«»“”„…।،؛؟-–—"
