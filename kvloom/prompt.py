"""The prompt as token ids: header | chunks | question, each tokenized once on its own and joined.

So the ids of a chunk depend on its document and the format only: not on the question, the other chunks or its
place. The header is what the chat template puts before the user's text, and the instruction; the question
part ends where the assistant's answer begins. Any template is cut the same way: it is rendered with markers
in place of the passages and the question, and the rendered text is cut at the markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from io import IOBase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from kvloom.errors import ContextTooLong, DocumentError, MethodError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.tokenizer import Tokenizer

Header = Literal["shared", "none"]
CUTTING = 1  # of the rules by which documents become chunks; raise it when they change
_MIN_CHUNK_TOKENS = 32  # so that one character always fits


@dataclass(frozen=True)
class Document:
    """A text to answer from. A plain string is accepted wherever a Document is."""

    text: str
    id: str | None = None
    title: str | None = None


@dataclass(frozen=True, eq=False)
class Chunk:
    """A document, or a piece of a long one, as it stands in the context."""

    token_ids: Tensor  # (T,) int64
    document: int  # index of its document
    text: str


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token ids of a question and its context. Rows count from the header's first token."""

    header_ids: Tensor  # (T,) int64
    chunk_ids: list[Tensor]  # (T,) int64 each
    question_ids: Tensor  # (Q,) int64, up to where the answer begins
    question_span: range  # the raw question's tokens inside question_ids
    chunk_documents: tuple[int, ...]  # index of each chunk's document

    @cached_property
    def context_ids(self) -> Tensor:
        """Header and chunks, (T,) int64."""
        return torch.cat([self.header_ids, *self.chunk_ids])

    @cached_property
    def token_ids(self) -> Tensor:
        """Context and question, (T + Q,) int64."""
        return torch.cat([self.context_ids, self.question_ids])

    @cached_property
    def spans(self) -> list[range]:
        """The rows of each chunk."""
        spans, start = [], len(self.header_ids)
        for ids in self.chunk_ids:
            spans.append(range(start, start + len(ids)))
            start += len(ids)
        return spans

    @cached_property
    def document_spans(self) -> list[range]:
        """The rows of each document: all its chunks."""
        spans: dict[int, range] = {}
        for document, span in zip(self.chunk_documents, self.spans, strict=True):
            spans[document] = range(spans.get(document, span).start, span.stop)
        return [spans[document] for document in sorted(spans)]

    @property
    def groups(self) -> list[list[int]]:
        """The chunk indices of each document, in context order."""
        groups: dict[int, list[int]] = {}
        for index, document in enumerate(self.chunk_documents):
            groups.setdefault(document, []).append(index)
        return list(groups.values())

    def reordered(self, order: Sequence[int]) -> Prompt:
        """The same prompt with the chunks in another order: `order` lists each chunk index once."""
        if sorted(order) != list(range(len(self.chunk_ids))):
            raise PromptError(
                f"an order must name each of {len(self.chunk_ids)} chunks once, got {list(order)}"
            )
        return replace(
            self,
            chunk_ids=[self.chunk_ids[index] for index in order],
            chunk_documents=tuple(self.chunk_documents[index] for index in order),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of context and question."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The words around the documents and the question, and how long a chunk may be.

    Without a chat template, or with ``chat=False``, the header is the BOS token alone, so `system` and any
    `instruction` but the default are refused there. Raises ``MethodError`` for a value out of range.
    """

    system: str | None = None  # in the template's system role, or before the instruction where it has none
    instruction: str = "Answer the question using the passages below. Be brief."
    question_label: str = "Question:"
    answer_label: str = "Answer:"  # ends the prompt where no chat template does
    chat: bool = True  # use the tokenizer's chat template when it has one
    thinking: bool = False  # let the model think before it answers, where its template has the switch
    date: str = "2024-07-26"  # for templates that state the date; a fixed one keeps chunks reusable
    chunk_tokens: int = 1024  # longer documents are split
    header: Header = "shared"  # whether chunks are prefilled behind the header

    def __post_init__(self) -> None:
        if not isinstance(self.chunk_tokens, int) or self.chunk_tokens < _MIN_CHUNK_TOKENS:
            raise MethodError(f"chunk_tokens must be at least {_MIN_CHUNK_TOKENS}, got {self.chunk_tokens}")
        if self.header not in get_args(Header):
            raise MethodError(f"header must be one of {', '.join(get_args(Header))}; got {self.header!r}")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise MethodError(f"date must look like 2024-07-26, got {self.date!r}") from None


def check_fits(prompt: Prompt, limit: int | None, max_new_tokens: int) -> None:
    """Raises ``ContextTooLong`` when prompt and answer have more tokens than `limit`, and says what helps."""
    if limit is None or prompt.num_tokens + max_new_tokens <= limit:
        return
    room = limit - max_new_tokens - len(prompt.question_ids)
    fitting = sum(1 for span in prompt.document_spans if span.stop <= room)
    asked = f"prompt has {prompt.num_tokens:,} tokens"
    advice = f"give fewer documents or --top {fitting}" if fitting else "give a shorter document or question"
    if prompt.num_tokens < limit:
        asked += f" and the answer may have {max_new_tokens:,}"
        advice = f"ask for at most {limit - prompt.num_tokens:,} new tokens" + (
            f", or {advice}" if fitting else ""
        )
    raise ContextTooLong(f"{asked}, model takes {limit:,}: {advice}")


def as_document(document: str | Document) -> Document:
    """`document` as a Document; raises ``DocumentError`` for anything else, and for text that is not
    Unicode.
    """
    found = Document(document) if isinstance(document, str) else document
    if not isinstance(found, Document) or not isinstance(found.text, str):
        kind = type(found.text if isinstance(found, Document) else found).__name__
        raise DocumentError(f"a document must be a string or a Document with a string as text, got {kind}")
    if found.title is not None and not isinstance(found.title, str):
        raise DocumentError(f"a document's title must be a string, got {type(found.title).__name__}")
    for what, text in (("text", found.text), ("title", found.title or "")):
        if not is_unicode(text):
            name = "" if found.id is None else f" {found.id!r}"
            raise DocumentError(f"document{name}: its {what} holds half a character (a lone surrogate)")
    return found


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: no surrogate stands alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def header_ids(tokenizer: Tokenizer, format: PromptFormat) -> Tensor:
    """The tokens before the first chunk, (T,) int64. Raises ``PromptError`` as `prompt` does."""
    return _header_ids(tokenizer, _frame(tokenizer, format))


def as_documents(documents: Iterable[str | Document]) -> list[Document]:
    """The documents; raises ``DocumentError`` when there is none, or one is empty."""
    if isinstance(documents, str | Document):
        raise DocumentError("documents must be a list; put the one document into brackets")
    if isinstance(documents, Mapping | IOBase) or not isinstance(documents, Iterable):
        raise DocumentError(
            f"documents must be a list of strings or Documents, got {type(documents).__name__}"
        )
    found = [as_document(document) for document in documents]
    for place, document in enumerate(found):
        if not document.text.strip():
            raise DocumentError(f"document {document.id or place!r} is empty; leave it out")
    if not found:
        raise DocumentError("there is no document to answer from; give at least one")
    return found


def chunks(tokenizer: Tokenizer, format: PromptFormat, documents: Iterable[str | Document]) -> list[Chunk]:
    """The documents in order, as chunks of at most ``format.chunk_tokens`` tokens, at least one for each.

    Raises ``DocumentError`` as `as_documents` does.
    """
    found = []
    for place, document in enumerate(as_documents(documents)):
        title = " ".join((document.title or "").split())
        text = f"{title}\n{document.text}\n\n" if title else f"{document.text}\n\n"
        found += [
            Chunk(torch.tensor(ids, dtype=torch.int64), place, piece)
            for piece, ids in _split(tokenizer, text, format.chunk_tokens)
        ]
    return found


def prompt(
    tokenizer: Tokenizer, format: PromptFormat, question: str, documents: Iterable[str | Document]
) -> Prompt:
    """The prompt for `question` over `documents`.

    Raises ``PromptError`` for an empty question or a chat template that cannot be cut, and as `chunks` does.
    """
    if not isinstance(question, str):
        raise PromptError(f"the question must be a string, got {type(question).__name__}")
    if not question.strip():
        raise PromptError("the question is empty; ask something")
    if not is_unicode(question):
        raise PromptError("the question holds half a character (a lone surrogate); write it in UTF-8")
    frame = _frame(tokenizer, format)
    parts = chunks(tokenizer, format, documents)
    before = tokenizer.encode(frame.before, special=True)
    asked = tokenizer.encode(frame.blank + question.strip())
    after = tokenizer.encode(frame.after, special=True)
    return Prompt(
        header_ids=_header_ids(tokenizer, frame),
        chunk_ids=[chunk.token_ids for chunk in parts],
        question_ids=torch.tensor(before + asked + after, dtype=torch.int64),
        question_span=range(len(before), len(before) + len(asked)),
        chunk_documents=tuple(chunk.document for chunk in parts),
    )


@dataclass(frozen=True)
class _Frame:
    """The prompt's fixed text: header | chunks | before, blank + question, after."""

    header: str | None  # None: the BOS token alone
    before: str
    blank: str  # belongs to the question's text, since tokenizers merge a blank with the word behind it
    after: str


def _header_ids(tokenizer: Tokenizer, frame: _Frame) -> Tensor:
    if frame.header is None:
        ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    else:
        ids = tokenizer.encode(frame.header, special=True, first=True)
    return torch.tensor(ids, dtype=torch.int64)


def _frame(tokenizer: Tokenizer, format: PromptFormat) -> _Frame:
    label = format.question_label.rstrip()
    blank = " " if label else ""
    if not (format.chat and tokenizer.has_template):
        for name, default in (("system", None), ("instruction", PromptFormat.instruction)):
            if getattr(format, name) != default:
                why = "the tokenizer has no chat template" if format.chat else "chat=False"
                raise PromptError(f"{why}, so the prompt has no place for {name}; leave it out")
        return _Frame(None, label, blank, f"\n{format.answer_label}")
    words = f"{format.system} {format.instruction} {label} {tokenizer.raw.chat_template}"
    cuts = []
    for length in (1, 2):  # two lengths, so that what depends on the text shows up as a difference
        context, question = (_marker(name, length, words) for name in ("passages", "question"))
        instruction = f"{format.instruction.rstrip()}\n\n" if format.instruction.strip() else ""
        rendered = _render(tokenizer, format, f"{instruction}{context}{label}{blank}{question}")
        cuts.append(_cut_at(rendered, context, blank + question))
    if cuts[0] != cuts[1]:
        raise PromptError(
            "the chat template cannot be cut into header, passages and question, since it renders "
            "differently for different passages; use PromptFormat(chat=False), or another template"
        )
    header, before, after = cuts[0]
    return _Frame(header, before, blank, after)


def _marker(name: str, length: int, words: str) -> str:
    marker = "kvloom" + name * length
    while marker in words:
        marker += "x"
    return marker


def _cut_at(rendered: str, context: str, question: str) -> tuple[str, str, str]:
    header, found_context, rest = rendered.partition(context)
    before, found_question, after = rest.partition(question)
    if not (found_context and found_question) or context in rest or question in after or question in header:
        raise PromptError(
            "the chat template cannot be cut into header, passages and question, since it does not "
            "show the user's text once and unchanged; use PromptFormat(chat=False), or another template"
        )
    return header, before, after


def _render(tokenizer: Tokenizer, format: PromptFormat, content: str) -> str:
    switches: dict[str, Any] = {
        "enable_thinking": format.thinking,  # Qwen, GLM
        "thinking": format.thinking,  # DeepSeek, Granite
        "today": date.fromisoformat(format.date),
    }
    user = {"role": "user", "content": content}
    system = (format.system or "").strip()
    if not system:
        return tokenizer.render([user], **switches)
    try:
        rendered = tokenizer.render([{"role": "system", "content": system}, user], **switches)
        if system in rendered:
            return rendered
    except PromptError:
        pass  # no system role, as in Gemma: the system text then opens the user's
    return tokenizer.render([{"role": "user", "content": f"{system}\n\n{content}"}], **switches)


# A long document is cut after a match, best places first. Each pattern reads any text only once.
_BOUNDARIES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n(?:[ \t]*\n)+",
        r"[.!?…][\"'”’)\]]{0,3}(?=\s+\S)|[。！？][”’」』）]{0,3}(?=\s*\S)",  # noqa: RUF001
        r"\S(?=\n\s*\S)",
        r"\S(?=\s+\S)",
    )
)


def _split(tokenizer: Tokenizer, text: str, limit: int) -> list[tuple[str, list[int]]]:
    """`text` in pieces of at most `limit` tokens, with their ids; the pieces joined are `text`."""
    ids = tokenizer.encode(text)
    if len(ids) <= limit:
        return [(text, ids)]
    pieces, atoms, room = [], [], limit
    for atom, num_tokens in _atoms(tokenizer, text, limit, 0):
        if num_tokens > room and atoms:
            pieces += _join(tokenizer, atoms, limit)
            atoms, room = [], limit
        atoms.append(atom)
        room -= num_tokens
    return pieces + _join(tokenizer, atoms, limit)


def _join(tokenizer: Tokenizer, atoms: list[str], limit: int) -> list[tuple[str, list[int]]]:
    text = "".join(atoms)
    ids = tokenizer.encode(text)
    if len(ids) <= limit or len(atoms) == 1:
        return [(text, ids)]
    half = len(atoms) // 2  # joined, texts seldom need more tokens than apart, but they may
    return _join(tokenizer, atoms[:half], limit) + _join(tokenizer, atoms[half:], limit)


def _atoms(tokenizer: Tokenizer, text: str, limit: int, level: int) -> Iterable[tuple[str, int]]:
    """`text`, too long for one piece, cut at the best places into parts of at most `limit` tokens."""
    if level == len(_BOUNDARIES):
        yield from _hard_cuts(tokenizer, text, limit)
        return
    cuts = [0, *(match.end() for match in _BOUNDARIES[level].finditer(text)), len(text)]
    parts = [text[start:end] for start, end in pairwise(cuts) if start < end]
    for part in parts:
        num_tokens = len(tokenizer.encode(part)) if len(parts) > 1 else limit + 1
        if num_tokens <= limit:
            yield part, num_tokens
        else:
            yield from _atoms(tokenizer, part, limit, level + 1)


def _hard_cuts(tokenizer: Tokenizer, text: str, limit: int) -> Iterable[tuple[str, int]]:
    start = 0
    while start < len(text):
        part = text[start : start + 4 * limit]
        ids = tokenizer.encode(part)
        head = tokenizer.decode(ids[:limit]).rstrip("\N{REPLACEMENT CHARACTER}")
        if len(ids) > limit and head and part.startswith(head):
            part, ids = head, tokenizer.encode(head)  # a token boundary
        while len(ids) > limit and len(part) > 1:
            part = part[: max(1, min(len(part) - 1, len(part) * limit // len(ids)))]
            ids = tokenizer.encode(part)
        yield part, len(ids)
        start += len(part)
