"""`kvloom eval` and `kvloom report`."""

from pathlib import Path
from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark


def evaluate(
    sets: Annotated[
        list[str],
        typer.Argument(
            metavar="SETS...", help="Names of sets, such as hotpotqa or needle:lengths=[500,1000]."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the run; resumed if begun.")],
    model: Model = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-s",
            metavar="NAME[:OPTION=VALUE,...]",
            help="A selector with its options, and reorder=true; repeatable; full and none are the anchors.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            envvar="KVLOOM_DATA",
            help="Folder of the sets; without it LongBench is read from the Hugging Face hub.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Samples per set.", show_default=False)
    ] = None,
    chunks: Annotated[
        str, typer.Option("--chunks", metavar="HOW", help="passages, or fixed: all joined, cut by tokens.")
    ] = "passages",
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", metavar="N", help="Longest chunk.")] = 2048,
    header: Annotated[
        str, typer.Option("--header", metavar="HOW", help="shared: chunks are prefilled behind it; or none.")
    ] = "shared",
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context", min=1, metavar="N", help="Skip samples of a longer context.", show_default=False
        ),
    ] = None,
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
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval.benchmark import build, take
        from kvloom.eval.runner import Method, Run, make_recipe, read_lines, run, split_options
        from kvloom.loom import Loom
        from kvloom.prompt import PromptFormat
    methods = [Method.parse(text) for text in method or ["full", "none", "infoflow"]]
    benchmarks = []
    for text in sets:
        set_name, _, options = text.partition(":")
        benchmarks.append(build(set_name, split_options(text, options), seed=seed))
    samples = [take(benchmark, data, limit) for benchmark in benchmarks]
    prompt_format = PromptFormat(chunk_tokens=chunk_tokens, header=header)  # type: ignore[arg-type]
    with Activity(f"loading {name}"):
        session.check_device(device)
        loom = Loom.from_pretrained(
            name, store="memory:4GiB", dtype=dtype, device=device, prompt_format=prompt_format
        )
    recipe = make_recipe(
        loom,
        name,
        benchmarks,
        samples,
        methods,
        limit=limit,
        chunks=chunks,
        max_new_tokens=max_new_tokens,
        max_context=max_context,
    )
    folder = Run(out, recipe)
    with Activity("evaluating (samples)") as activity:
        run(loom, benchmarks, samples, methods, folder, recipe, on_progress=activity.update)
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
) -> None:
    """Make tables and pictures of runs: report.md, and report.html in one file."""
    with Activity("reporting"):
        from kvloom.eval.report import report as make_report

        made = make_report(runs, out)
    typer.echo(made.markdown)
    remark(f"written: {made.html}")
