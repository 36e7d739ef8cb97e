"""`kvloom eval` and `kvloom report`."""

from pathlib import Path
from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, Limit, MaxContext, RunFolder, Sets, measure
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark


def evaluate(
    sets: Sets,
    out: RunFolder,
    model: Model = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-s",
            metavar="NAME[:OPTION=VALUE,...][@COMPRESSOR]",
            help="A selector with its options, and reorder=true; after @ what compresses the chunks, as in "
            "none@infokv:keep=0.5; repeatable; full and none are the anchors.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    limit: Limit = None,
    chunks: Annotated[
        str, typer.Option("--chunks", metavar="HOW", help="passages, or fixed: all joined, cut by tokens.")
    ] = "passages",
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", metavar="N", help="Longest chunk.")] = 2048,
    header: Annotated[
        str, typer.Option("--header", metavar="HOW", help="shared: chunks are prefilled behind it; or none.")
    ] = "shared",
    max_context: MaxContext = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=0, metavar="N", help="Of greedy answers, for F1; 0 for none."),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of sets that draw their samples.")] = 0,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure methods against full prefill on question-answering sets.

    One line per sample and method goes to DIR/results.jsonl; kvloom report makes tables and pictures of it.
    """
    measure(
        session.need_model(model),
        sets,
        method or ["full", "none", "infoflow"],
        out,
        data=data,
        limit=limit,
        max_context=max_context,
        dtype=dtype,
        device=device,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        header=header,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    from kvloom.eval.journal import read_lines

    results, skipped = read_lines(out / "results.jsonl"), read_lines(out / "skipped.jsonl")
    if json:
        echo_json({"out": str(out), "results": len(results), "skipped": skipped})
    else:
        remark(f"{count(len(results), 'result')}, {count(len(skipped), 'sample')} skipped as too long")
        typer.echo(out)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that kvloom eval made.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where to write; the first run by default.", show_default=False
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="METHOD",
            help="What paired tests are against, as given to eval; by default the infoflow of the lowest KL.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make tables and pictures of runs: report.md, and report.html in one file."""
    with Activity("reporting"):
        from kvloom.eval.report import report as make_report

        made = make_report(runs, out, baseline=baseline)
    typer.echo(made.markdown)
    remark(f"written: {made.html}")
