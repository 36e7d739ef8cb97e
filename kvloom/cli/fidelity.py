"""`kvloom fidelity`."""

from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, RunFolder
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark

TextSets = Annotated[list[str], typer.Argument(metavar="SETS...", help="Text sets: prose, gsm8k.")]
Documents = Annotated[
    int, typer.Option("--documents", min=1, metavar="N", help="Of each set; at least 30 for a claim.")
]
Prefix = Annotated[
    int, typer.Option("--prefix", min=1, metavar="TOKENS", help="Whose cache it is about.", show_default=True)
]
Continuation = Annotated[
    int,
    typer.Option("--continuation", metavar="TOKENS", help="Run after it; a multiple of 128, at least 256."),
]


def fidelity(
    sets: TextSets,
    out: RunFolder,
    model: Model = None,
    compressor: Annotated[
        list[str] | None,
        typer.Option(
            "--compressor",
            "-c",
            metavar="NAME[:OPTION=VALUE,...]",
            help="A compressor; repeatable; by default infokv, its parent, random and query-free ones.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        list[float] | None,
        typer.Option(
            "--keep",
            metavar="SHARE",
            help="Share of tokens that is kept; repeatable; by default 0.1, 0.2, 0.4 and 0.6.",
            show_default=False,
        ),
    ] = None,
    documents: Documents = 10,
    prefix: Prefix = 1024,
    continuation: Continuation = 1024,
    data: Data = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure how close predictions over compressed caches stay to the full cache's, on texts.

    One line per document, compressor and share goes to DIR/results.jsonl, and a report beside it. An
    interrupted run goes on where it stopped.
    """
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval import fidelity as measure
        from kvloom.eval.fidelity_report import report
        from kvloom.eval.plots import require_matplotlib
        from kvloom.eval.texts import check_lengths, check_sets, load_texts, num_tokens
    methods, keeps = compressor or list(measure.METHODS), keep or list(measure.KEEPS)
    measure.contenders(methods, keeps)  # what is wrong with them is found before a model is loaded
    check_sets(sets)
    check_lengths(prefix, continuation)
    require_matplotlib()
    loom = session.open_loom(name, "memory:", 1024, dtype, device)
    with Activity("reading the texts"):
        length = num_tokens(prefix, continuation)
        texts = load_texts(loom, sets, data, documents=documents, length=length)
    recipe = measure.make_recipe(loom, name, texts, methods, keeps, prefix=prefix, continuation=continuation)
    with Activity("measuring (results)") as activity:
        journal = measure.run(loom, texts, recipe, out, on_progress=activity.update)
    with Activity("reporting"):
        page = report(out)
    if json:
        echo_json({"out": str(out), "results": len(journal.done), "report": str(page)})
    else:
        remark(f"{count(len(journal.done), 'result')}; written: {page}")
        typer.echo((out / "report.md").read_text(encoding="utf-8"), nl=False)
