"""`kvloom solve`."""

from typing import Annotated

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, Limit, RunFolder
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, count, echo_json, remark
from kvloom.cli.recall import Baseline


def solve(
    sets: Annotated[
        list[str],
        typer.Argument(
            metavar="SETS...",
            help="gsm8k, ifeval, humaneval; from the hub longreason:length=16k, aime, livecodebench, ifeval.",
        ),
    ],
    out: RunFolder,
    model: Model = None,
    decode_compressor: Annotated[
        list[str] | None,
        typer.Option(
            "--decode-compressor",
            "-d",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Compresses answers while they grow; repeatable; by default infokv, rpc, r-kv and controls.",
            show_default=False,
        ),
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option(
            "--compressor",
            "-c",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Compresses the prompts too, such as snapkv:keep=0.4; by default they stay whole.",
            show_default=False,
        ),
    ] = None,
    keep: Annotated[
        list[float] | None,
        typer.Option(
            "--keep",
            metavar="SHARE",
            help="Share of generated tokens that is kept; repeatable; by default 0.25.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option("--every", min=1, metavar="N", help="Generated tokens between two compressions."),
    ] = 64,
    recent: Annotated[
        int, typer.Option("--recent", min=1, metavar="N", help="Last generated tokens, which always stay.")
    ] = 16,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=0, metavar="N", help="Of greedy answers; 0 for none."),
    ] = 256,
    baseline: Baseline = None,
    limit: Limit = None,
    data: Data = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Measure answers that are compressed while they grow: likelihood of right ones, and greedy ones judged.

    One line per task, compressor and share goes to DIR/results.jsonl, and a report beside it. An interrupted
    run goes on where it stopped. Programs that the model writes are never run. A model as small as the
    bundled one (135M) solves no problem of AIME or LiveCodeBench: these sets are for strong models on a GPU.
    """
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval import solve as measure
        from kvloom.eval.recall import check_baseline
        from kvloom.eval.solve_report import report
        from kvloom.eval.task import read_task_sets, take_tasks
    methods, keeps = decode_compressor or list(measure.METHODS), keep or list(measure.KEEPS)
    # What is wrong with them is found before a model is loaded.
    measure.arms(methods, keeps, every, recent, prompt_method=compressor)
    check_baseline(baseline, methods)
    chosen = read_task_sets(sets)
    tasks = [take_tasks(task_set, data, limit) for task_set in chosen]
    loom = session.open_loom(name, "memory:", 1024, dtype, device)
    recipe = measure.make_recipe(
        loom,
        name,
        chosen,
        tasks,
        limit=limit,
        prompt_method=compressor,
        decode_methods=methods,
        keeps=keeps,
        every=every,
        recent=recent,
        max_new_tokens=max_new_tokens,
    )
    with Activity("solving (results)") as activity:
        journal = measure.run(loom, chosen, tasks, recipe, out, on_progress=activity.update)
    page = report(out, baseline)
    if json:
        skipped = len(journal.skipped)
        echo_json({"out": str(out), "results": len(journal.done), "skipped": skipped, "report": str(page)})
    else:
        left_out = f", {count(len(journal.skipped), 'task')} skipped as too long" if journal.skipped else ""
        remark(f"{count(len(journal.done), 'result')}{left_out}; written: {page}")
        typer.echo((out / "report.md").read_text(encoding="utf-8"), nl=False)
