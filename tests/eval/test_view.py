"""The page on one question: what it shows is the text, the scores and the choice, and nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from byte_tokenizer import ByteTokenizer
from tiny_models import DOCUMENTS, QUESTION, loom_of

from kvloom.errors import MethodError
from kvloom.eval.view import Panel, Piece, look, page, pieces
from kvloom.probe import Probe
from kvloom.prompt import Document, PromptFormat
from kvloom.selectors import Epic, Full, InfoFlow, NoRecompute, Random
from kvloom.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvloom.loom import Loom

EVIL = "<script>alert(\"&amp;\")</script> ]]> 'x' é 漢字 😀 \0\r\n\ttab"


class Reader(HTMLParser):
    """Tokens of a page as (text, classes, title), by the heading that they stand under."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.headings: list[str] = []
        self.tokens: list[list[tuple[str, str, str]]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += list(given.items())
        if tag in ("h3", "summary"):
            self.headings.append("")
            self.tokens.append([])
            self._inside = tag
        elif tag == "i" and "title" in given:
            self.tokens[-1].append(("", given.get("class", ""), given["title"]))
            self._inside = "i"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h3", "summary", "i"):
            self._inside = ""

    def handle_data(self, text: str) -> None:
        if self._inside in ("h3", "summary"):
            self.headings[-1] += text
        elif self._inside == "i":
            shown, classes, title = self.tokens[-1][-1]
            self.tokens[-1][-1] = (shown + text, classes, title)

    def text(self, place: int) -> str:
        return "".join(shown for shown, _, _ in self.tokens[place])


def draw(loom: Loom, documents: list[Any], *panels: Panel, **given: Any) -> Reader:
    given = {"model": "tiny"} | given
    found = [d if isinstance(d, Document) else Document(d) for d in documents]
    return Reader(page(QUESTION, found, panels, loom.tokenizer, **given))


def test_a_panel_is_what_the_loom_chooses() -> None:
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    for selector in (InfoFlow(ratio=0.2), InfoFlow(geometry="hl-tp"), Epic(), Random(seed=3)):
        panel = look(loom, prompt, selector)
        cache = loom.splice(prompt)
        assert panel.rows == loom.select(cache, prompt, selector).tolist()
        assert panel.exact == cache.exact.tolist()
        assert panel.order == [0, 1, 2, 3]
        assert panel.exact_recipe == repr(selector)
    probe = Probe(loom.decoder, loom.splice(prompt), prompt.question_ids, prompt.question_span)
    assert look(loom, prompt, InfoFlow()).scores == InfoFlow().score(probe).tolist()
    with pytest.raises(MethodError, match="full computes every row, so there is no choice to look at"):
        look(loom, prompt, Full())


def test_reordered_documents_are_shown_as_read_under_their_own_names() -> None:
    loom = loom_of("llama", prompt_format=PromptFormat(chunk_tokens=40))
    documents = [Document(text, title=f"T{place}") for place, text in enumerate(DOCUMENTS)]
    prompt = loom.prompt(QUESTION, documents)
    assert prompt.chunk_documents.count(0) == 2, "the first document has two parts"
    panel = look(loom, prompt, InfoFlow(), reorder="chunks")
    expected = loom.reorder(prompt, InfoFlow(), by="chunks")
    assert [ids.tolist() for ids in panel.prompt.chunk_ids] == [ids.tolist() for ids in expected.chunk_ids]
    assert panel.order != sorted(panel.order), "the case that matters"
    drawn = draw(loom, documents, panel)
    given = [
        f"{document + 1}" if document == 1 else f"{document + 1}." for document in prompt.chunk_documents
    ]
    for place, chunk in enumerate(panel.order):
        heading = drawn.headings[1 + place]  # after the header's
        document = prompt.chunk_documents[chunk]
        assert heading.startswith(given[chunk])
        assert f" T{document} rows" in heading
        part = prompt.chunk_documents[: chunk + 1].count(document)
        if prompt.chunk_documents.count(document) > 1:
            assert heading.startswith(f"{document + 1}.{part}. ")
        assert drawn.text(1 + place) == loom.tokenizer.decode(prompt.chunk_ids[chunk].tolist())
    names = ", ".join(heading.split(". T")[0] for heading in drawn.headings[1:])
    text = page(QUESTION, documents, [panel], loom.tokenizer, model="tiny")
    assert f"Read in the order {names} of the passages as given." in text
    plain = page(QUESTION, documents, [look(loom, prompt, InfoFlow())], loom.tokenizer, model="tiny")
    assert "Read in the order" not in plain


def test_marks_and_shades_are_the_choice_and_the_scores() -> None:
    loom = loom_of("llama")
    prompt = loom.prompt(QUESTION, DOCUMENTS)
    panel = look(loom, prompt, InfoFlow(ratio=0.2))
    drawn = draw(loom, DOCUMENTS, panel)
    tokens = [token for part in drawn.tokens for token in part]
    assert len(tokens) == len(prompt.context_ids), "plain ASCII: a byte is a token is a character"
    said = [re.fullmatch(r"'.*': row ([\d,]+), (.*)", title) for _, _, title in tokens]
    assert all(found and int(found[1].replace(",", "")) == row for row, found in enumerate(said))
    marked = [row for row, (_, classes, _) in enumerate(tokens) if "new" in classes.split()]
    assert marked == panel.rows
    assert [row for row, found in enumerate(said) if found and "recomputed" in found[2]] == panel.rows
    grey = [row for row, (_, classes, _) in enumerate(tokens) if "exact" in classes.split()]
    assert grey == [row for row, is_exact in enumerate(panel.exact) if is_exact]
    assert len(prompt.header_ids) < len(grey) < len(tokens)
    free = [row for row in range(len(tokens)) if row not in grey]
    shades = [int(re.search(r"s(\d+)|$", tokens[row][1])[1] or 0) for row in free]  # type: ignore[index]
    in_order = [shade for _, shade in sorted(zip((panel.scores[row] for row in free), shades, strict=True))]
    assert in_order == sorted(in_order)
    assert (in_order[0], in_order[-1]) == (0, 10)
    assert len(set(in_order)) > 5
    best = max(free, key=panel.scores.__getitem__)
    assert tokens[best][2].endswith(f", score {panel.scores[best]:.4g}, rank 1 of {len(free)}, recomputed")


def test_a_method_without_scores_shades_nothing() -> None:
    loom = loom_of("llama")
    drawn = draw(loom, DOCUMENTS, look(loom, loom.prompt(QUESTION, DOCUMENTS), NoRecompute()))
    classes = {word for part in drawn.tokens for _, names, _ in part for word in names.split()}
    assert classes == {"exact"}


def test_every_text_is_shown_as_it_is_and_nothing_is_interpreted() -> None:
    loom = loom_of("llama")
    documents = [Document("plain"), Document(EVIL, title=EVIL), Document(EVIL[::-1], id='"><b>')]
    prompt = loom.prompt(QUESTION, documents)
    panel = look(loom, prompt, InfoFlow(ratio=0.3))
    drawn = draw(loom, documents, panel, model=EVIL, answers=[EVIL], supporting=[1])
    pictured = {0: "\N{SYMBOL FOR NULL}", 13: "\N{SYMBOL FOR CARRIAGE RETURN}"}
    for place in range(3):
        expected = loom.tokenizer.decode(prompt.chunk_ids[place].tolist())
        assert drawn.text(1 + place) == expected.translate(pictured)
    assert "😀" in drawn.text(2)
    emoji = next(token for token in drawn.tokens[2] if token[0] == "😀")
    assert emoji[2].count("row ") == 4, "four bytes, four rows, one character"
    assert not {"script", "link", "img", "iframe", "object"} & set(drawn.tags)
    assert not [value for name, value in drawn.attributes if name in ("href", "src") or name.startswith("on")]
    assert [" gold " in heading for heading in drawn.headings[1:]] == [False, True, False]


def test_the_page_asks_for_nothing_over_the_network() -> None:
    loom = loom_of("llama")
    panel = look(loom, loom.prompt(QUESTION, DOCUMENTS), Random())
    text = page(QUESTION, [Document(d) for d in DOCUMENTS], [panel, panel], loom.tokenizer, model="tiny")
    assert not re.search(r"https?:|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert text.count("<section>") == 2


@pytest.mark.parametrize(
    "raw", ["aé漢😀b".encode(), b"a\xc3", b"\xe6\xbc", b"\xffa\xff\xfeb", b"", b"\xf0\x9f\x98a"]
)
def test_pieces_take_every_token_once_and_join_to_the_text(raw: bytes) -> None:
    tokenizer = Tokenizer(ByteTokenizer())
    found = pieces(tokenizer, list(raw))
    assert "".join(piece.text for piece in found) == tokenizer.decode(list(raw), skip_special=False)
    assert [place for piece in found for place in piece.tokens] == list(range(len(raw)))
    assert all(piece.text for piece in found)


def test_pieces_end_with_characters() -> None:
    ids = list("aé😀".encode())
    assert pieces(Tokenizer(ByteTokenizer()), ids) == [
        Piece("a", [0]),
        Piece("é", [1, 2]),
        Piece("😀", [3, 4, 5, 6]),
    ]
