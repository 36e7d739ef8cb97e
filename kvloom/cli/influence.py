"""`kvloom influence`."""

from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.fidelity import Continuation, Documents, Prefix, TextSets
from kvloom.cli.measure import Data, RunFolder
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark


def influence(
    sets: TextSets,
    out: RunFolder,
    model: Model = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove",
            "-r",
            metavar="SCORE[:matched][:early|middle|late]",
            help="Rows to remove, such as entropy or attention-head:matched; repeatable; by default all.",
            show_default=False,
        ),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            "--share",
            metavar="SHARE",
            help="Rows to remove, of the prefix's; repeatable; 0.094 by default, 96 of 1,024.",
            show_default=False,
        ),
    ] = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Also the direct effect, which takes as long again.")
    ] = False,
    singles: Annotated[
        int, typer.Option("--singles", min=0, metavar="N", help="Also remove N single rows of each document.")
    ] = 0,
    window: Annotated[
        int,
        typer.Option("--window", min=1, metavar="N", help="Last queries that attention is of; they stay."),
    ] = 32,
    documents: Documents = 10,
    prefix: Prefix = 1024,
    continuation: Continuation = 1024,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    data: Data = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure what later predictions owe to cached tokens, chosen by entropy, attention and controls.

    Rows are removed from the exact cache of a prefix, and the text after it is run. One line per document
    and removal goes to DIR/results.jsonl, and a report beside it. An interrupted run goes on.
    """
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval import influence as measure
        from kvloom.eval.influence_report import report
        from kvloom.eval.influence_sets import DEFAULT_SETS
        from kvloom.eval.plots import require_matplotlib
        from kvloom.eval.texts import check_lengths, check_sets, load_texts, num_tokens
    removed, shares = remove or list(DEFAULT_SETS), share or [0.094]
    measure.removal_sets(removed, shares)  # what is wrong with them is found before a model is loaded
    check_sets(sets)
    check_lengths(prefix, continuation)
    require_matplotlib()
    loom = session.open_loom(name, "memory:", 1024, dtype, device)
    with Activity("reading the texts"):
        length = num_tokens(prefix, continuation)
        texts = load_texts(loom, sets, data, documents=documents, length=length)
    recipe = measure.make_recipe(
        loom,
        name,
        texts,
        prefix=prefix,
        continuation=continuation,
        removed=removed,
        shares=shares,
        effects=list(measure.EFFECTS if direct else measure.EFFECTS[:1]),
        singles=singles,
        window=window,
        seed=seed,
    )
    with Activity("measuring (results)") as activity:
        journal = measure.run(loom, texts, recipe, out, on_progress=activity.update)
    with Activity("reporting"):
        page = report(out)
    if json:
        echo_json({"out": str(out), "results": len(journal.done), "report": str(page)})
    else:
        remark(f"{count(len(journal.done), 'result')}; written: {page}")
        typer.echo((out / "report.md").read_text(encoding="utf-8"), nl=False)
