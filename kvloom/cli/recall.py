"""`kvloom recall`."""

from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, Limit, MaxContext, RunFolder, Sets, read_set
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark

Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="METHOD",
        help="What every method is compared with too, as it was named; random and its parent always are.",
        show_default=False,
    ),
]


def recall(
    sets: Sets,
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
            help="Share of tokens that is kept; repeatable; by default 0.2 and 0.4.",
            show_default=False,
        ),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            metavar="HOW",
            help="unseen or seen when the prompt is compressed; repeatable; by default both, told apart.",
            show_default=False,
        ),
    ] = None,
    baseline: Baseline = None,
    limit: Limit = None,
    max_context: MaxContext = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=0, metavar="N", help="Of greedy answers, for F1; 0 for none."),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of sets that draw their samples.")] = 0,
    data: Data = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure answers over compressed prompts, the question unseen and seen by the compressor.

    One line per sample, way, compressor and share goes to DIR/results.jsonl, and a report beside it. An
    interrupted run goes on where it stopped.
    """
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval import recall as measure
        from kvloom.eval.benchmark import take
        from kvloom.eval.fidelity import contenders
        from kvloom.eval.recall_report import report
    methods, keeps = compressor or list(measure.METHODS), keep or list(measure.KEEPS)
    questions = question or list(measure.WAYS)
    contenders(methods, keeps)  # what is wrong with them is found before a model is loaded
    measure.check_ways(questions)
    measure.check_baseline(baseline, methods)
    benchmarks = [read_set(text, seed) for text in sets]
    samples = [take(benchmark, data, limit) for benchmark in benchmarks]
    loom = session.open_loom(name, "memory:", 2048, dtype, device)
    recipe = measure.make_recipe(
        loom,
        name,
        benchmarks,
        samples,
        limit=limit,
        questions=questions,
        methods=methods,
        keeps=keeps,
        max_new_tokens=max_new_tokens,
        max_context=max_context,
    )
    with Activity("measuring (results)") as activity:
        journal = measure.run(loom, benchmarks, samples, recipe, out, on_progress=activity.update)
    page = report(out, baseline)
    if json:
        skipped = len(journal.skipped)
        echo_json({"out": str(out), "results": len(journal.done), "skipped": skipped, "report": str(page)})
    else:
        left_out = f", {count(len(journal.skipped), 'sample')} skipped as too long" if journal.skipped else ""
        remark(f"{count(len(journal.done), 'result')}{left_out}; written: {page}")
        typer.echo((out / "report.md").read_text(encoding="utf-8"), nl=False)
