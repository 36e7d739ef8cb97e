"""`kvloom view`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, read_set
from kvloom.cli.options import (
    AsJson,
    ChunkTokens,
    Device,
    DtypeOption,
    MethodOptions,
    Model,
    StoreUrl,
    check_source,
    read_question,
)
from kvloom.cli.output import Activity, echo_json
from kvloom.errors import EvalError, MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.prompt import Document

DEFAULT_TOP = 8


def view(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page, such as view.html.")],
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="The question, or - for stdin.", show_default=False),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Folders, .txt .md .jsonl or .json files, or - for stdin.",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            "--selector",
            "-s",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Which rows are recomputed, infoflow by default; a panel for each one given.",
            show_default=False,
        ),
    ] = None,
    option: MethodOptions = None,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="As the selectors order the documents; or -s NAME:reorder=true.")
    ] = False,
    set_name: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="SET",
            help="Instead of a question and documents: a set, such as hotpotqa.",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="N|ID",
            help="Which sample of the set, by id or counted from 1.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            min=1,
            metavar="N",
            help=f"With more documents than this, BM25 picks; {DEFAULT_TOP} by default.",
            show_default=False,
        ),
    ] = None,
    store: StoreUrl = None,
    chunk_tokens: ChunkTokens = 1024,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Show what a method sees in the documents of one question, token by token, as an HTML page.

    Tokens are shaded by their score, the recomputed ones are underlined, and the page needs nothing else:
    no network, no script.
    """
    name = session.need_model(model)
    asked = _asked(question, sources, set_name, sample, data, top)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise MethodError(f"--out {out} is not a file in a folder that exists; name one, such as view.html")
    methods = _methods(selector or ["infoflow"], option, reorder)
    with Activity("starting"):
        from kvloom.eval import view as drawing
        from kvloom.eval.runner import Method
        from kvloom.profile import explicit_method
    for text in methods:
        Method.parse(text)  # what is wrong with it is found before a model is loaded
    loom = session.open_loom(name, store, chunk_tokens, dtype, device)
    ran = [Method.parse(explicit_method(text, loom.decoder)) for text in methods]
    with Activity("looking (methods)") as activity:
        prompt = loom.prompt(asked.question, asked.documents)
        panels = []
        for number, method in enumerate(ran):
            activity.update(number, len(ran))
            panels.append(drawing.look(method.over(loom), prompt, method.selector, method.reorder))
    page = drawing.page(
        asked.question,
        asked.documents,
        panels,
        loom.tokenizer,
        model=name,
        answers=asked.answers,
        supporting=asked.supporting,
    )
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise EvalError(f"cannot write the page to {str(out)!r}: {error.strerror}") from None
    if json:
        drawn = [panel.as_dict() for panel in panels]
        echo_json({"out": str(out), "question": asked.question, "panels": drawn})
    else:
        typer.echo(out)


class Asked(NamedTuple):
    """A question over documents; the rest is known of a benchmark's sample only."""

    question: str
    documents: "Sequence[Document]"
    answers: tuple[str, ...] = ()
    supporting: tuple[int, ...] = ()


def _asked(
    question: str | None,
    sources: list[str] | None,
    set_name: str | None,
    wanted: str | None,
    data: Path | None,
    top: int | None,
) -> Asked:
    """The question and its documents, from the command line or from a set."""
    if set_name is not None or wanted is not None:
        if question is not None or top is not None:
            raise MethodError(
                "--set brings question and documents, so QUESTION, SOURCE and --top have no place"
            )
        if set_name is None or wanted is None:
            raise MethodError("--set and --sample go together: the name of a set, and which sample of it")
        with Activity("reading the set"):
            from kvloom.eval.benchmark import find, take

            found = find(take(read_set(set_name), data), wanted)
        return Asked(found.question, found.documents, found.answers, found.supporting)
    if question is None or not sources:
        raise MethodError("name a question and documents, or a sample of a set with --set and --sample")
    for source in sources:
        check_source(source)
    question = read_question(question, "-" if "-" in sources else sources[0])
    documents = [document for source in sources for document in session.load_source(source)[0]]
    return Asked(question, session.pick(documents, question, top or DEFAULT_TOP))


def _methods(selectors: list[str], options: list[str] | None, reorder: bool) -> list[str]:
    """The methods as `kvloom eval` takes them."""
    from kvloom.registry import parse_options

    parse_options(options or [])
    written = " ".join(f"-s {text}" for text in selectors)
    if options and (len(selectors) > 1 or ":" in written):
        raise MethodError(
            f"-o goes with one plain -s NAME; with {written} write options as in "
            "-s infoflow:ratio=0.05,layers=paper"
        )
    if reorder and "reorder=" in written:
        raise MethodError(f"--reorder and {written} say twice whether to reorder; leave one out")
    more = ",".join([*(options or []), *(["reorder=true"] if reorder else [])])
    return [f"{text}{',' if ':' in text else ':'}{more}" if more else text for text in selectors]
