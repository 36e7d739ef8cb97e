"""The commands, one function each."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvloom import __version__
from kvloom.cli import bench as bench_commands
from kvloom.cli import (
    calibrate,
    compress,
    evaluate,
    falsify,
    fidelity,
    indexing,
    influence,
    recall,
    session,
    show,
    solve,
    stored,
    view,
)
from kvloom.cli import store as store_commands
from kvloom.cli.failures import FAILURE, INTERRUPTED, UsageError, fail, fail_usage, failures
from kvloom.cli.options import (
    AsJson,
    ChunkCompressor,
    ChunkTokens,
    Device,
    DtypeOption,
    GroupHelp,
    MethodOptions,
    Model,
    Namespace,
    SelectorName,
    Source,
    StoreUrl,
    Top,
    check_source,
    read_question,
    store_url,
)
from kvloom.cli.output import Activity, count, echo_json, remark
from kvloom.errors import MethodError


class _Commands(TyperGroup):
    """All commands, their failures turned into sentences and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        with failures():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    add_help_option=False,
    rich_markup_mode=None,  # plain help: rich alone would take longer than everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(store_commands.app, name="store")
app.add_typer(bench_commands.app, name="bench")
app.command("eval")(evaluate.evaluate)
app.command("report")(evaluate.report)
app.command("falsify")(falsify.falsify)
app.command("view")(view.view)
app.command("calibrate")(calibrate.calibrate)
app.command("compress")(compress.compress)
app.command("fidelity")(fidelity.fidelity)
app.command("influence")(influence.influence)
app.command("recall")(recall.recall)
app.command("solve")(solve.solve)


def run(args: list[str] | None = None) -> NoReturn:
    """The command line; the process ends with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # file names need not be UTF-8
    session.configure()
    try:
        code = app(args, prog_name="kvloom", standalone_mode=False)
    except UsageError as error:
        fail_usage(error)
    except typer.Abort:
        fail("interrupted", INTERRUPTED)
    if code == INTERRUPTED:  # of Typer itself: Ctrl-C before the command began
        fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def kvloom(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    help: GroupHelp = False,
) -> None:
    """Answer questions over documents whose KV caches were computed beforehand."""
    if version:
        typer.echo(f"kvloom {__version__}")
        raise typer.Exit
    if help or ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


@app.command()
def index(
    source: Source,
    model: Model = None,
    store: StoreUrl = None,
    namespace: Namespace = None,
    chunk_tokens: ChunkTokens = 1024,
    chunk_compressor: ChunkCompressor = None,
    dtype: DtypeOption = None,
    device: Device = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Share the work among a Ray cluster's devices: its address, auto, or local.",
            show_default=False,
        ),
    ] = None,
    ray_workers: Annotated[
        int | None,
        typer.Option(
            "--ray-workers",
            min=1,
            metavar="N",
            help="Workers with a model each; by default one for each GPU, or one.",
            show_default=False,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Compute and store the KV of documents, once, under their ids.

    What is stored already is not computed again, so an interrupted run continues where it stopped, and a
    document that has not changed since costs a look at its file. With --ray, the exit code is 1 when a
    document could not be indexed.
    """
    name = session.need_model(model)
    store = store_url(store, shared=True)
    compressor = session.build_compressor(chunk_compressor)
    if ray is None and ray_workers is not None:
        raise MethodError("--ray-workers is for a Ray cluster; name it with --ray ADDRESS, or --ray local")
    documents, report = session.load_source(source)
    origin = indexing.origin(source)
    if ray is None:
        loom = session.open_loom(name, store, chunk_tokens, dtype, device, compressor, namespace=namespace)
        work = indexing.index(loom, {origin: documents})
    else:
        cluster = {"address": ray, "workers": ray_workers}
        made_by = {"dtype": dtype, "device": device, "chunk_compressor": compressor, "namespace": namespace}
        work = indexing.index_with_ray(name, documents, store, origin, chunk_tokens, cluster | made_by)
    indexing.echo_chunks(work, report, stored.open_shared(store, namespace), json=json)
    if work.failed:
        raise typer.Exit(FAILURE)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question, or - for stdin.")],
    source: Source,
    model: Model = None,
    selector: SelectorName = "infoflow",
    option: MethodOptions = None,
    reorder: Annotated[
        bool, typer.Option("--reorder", help="Put the documents that matter most next to the question.")
    ] = False,
    top: Top = 8,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Length limit.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0 always takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, metavar="K", help="Sample among the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens of joint mass P.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the answer before this text; repeatable."),
    ] = None,
    compressor: Annotated[
        str | None,
        typer.Option(
            "--compressor",
            "-c",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Drops rows of context and question before the answer, such as snapkv:keep=0.4.",
            show_default=False,
        ),
    ] = None,
    store: StoreUrl = None,
    namespace: Namespace = None,
    chunk_tokens: ChunkTokens = 1024,
    chunk_compressor: ChunkCompressor = None,
    dtype: DtypeOption = None,
    device: Device = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of each chunk whether the store had it, and why not.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Answer a question over documents, from stored KV.

    What is not stored yet is computed, and stored for the next question. The answer goes to stdout, and a
    line on how it came about to stderr.
    """
    name = session.need_model(model)
    check_source(source)
    question = read_question(question, source)
    session.build_selector(selector, option)  # what is wrong with it is found before a model is loaded
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    session.check_sampling(sampling)
    dropping, chunk_dropping = map(session.build_compressor, (compressor, chunk_compressor))
    documents, _ = session.load_source(source)
    picked = session.pick(documents, question, top)
    loom = session.open_loom(name, store, chunk_tokens, dtype, device, chunk_dropping, namespace=namespace)
    chosen = session.fit_selector(loom, selector, option)
    with Activity("reading the documents"):
        stream = loom.stream(
            question, picked, selector=chosen, reorder=reorder, compressor=dropping, **sampling
        )
    for piece in stream:
        if not json:
            typer.echo(piece, nl=False)
    if json:
        echo_json(show.answer_summary(question, picked, stream.answer))
    else:
        typer.echo()
        remark(show.trace_line(stream.answer.trace, chosen.recipe))
        if explain:
            show.print_lookups(stream.answer.trace.lookups)


@app.command()
def verify(
    source: Source,
    model: Model = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", metavar="TEXT", help="A question to measure with; repeatable."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", metavar="FILE", help='One a line, or .jsonl with "question".'),
    ] = None,
    selector: SelectorName = "infoflow",
    option: MethodOptions = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            min=0.0,
            max=1.0,
            metavar="R",
            help="InfoFlow at this ratio, for comparison; repeatable; by default 0.05, 0.15 and 0.3.",
        ),
    ] = None,
    top: Top = 8,
    store: StoreUrl = None,
    chunk_tokens: ChunkTokens = 1024,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Check that reuse is right on this model and these documents.

    Compares moved keys with computed ones, and each method's next token with that of full prefill. Without
    questions, some are made from the documents. The exit code is 1 when the check is not passed.
    """
    name = session.need_model(model)
    check_source(source)
    asked = session.read_questions(question, questions)
    session.build_selector(selector, option)  # what is wrong with it is found before a model is loaded
    documents, _ = session.load_source(source)
    if not asked:
        asked = session.made_questions(documents)
        remark(
            f"no question given, so {count(len(asked), 'question')} made from the documents: "
            + " ".join(asked)
        )
    loom = session.open_loom(name, store, chunk_tokens, dtype, device)
    chosen = session.fit_selector(loom, selector, option)
    with Activity("verifying (questions)") as activity:
        report = loom.verify(
            asked,
            documents,
            selector=chosen,
            top=top,
            on_progress=activity.update,
            **({"ratios": ratio} if ratio else {}),
        )
    if json:
        echo_json(report.as_dict() | {"questions": asked})
    else:
        show.print_report(report)
    if not report.passed:
        raise typer.Exit(FAILURE)


@app.command()
def methods(json: AsJson = False) -> None:
    """List the selectors and compressors, what they do, and their options."""
    described = show.describe_methods() + show.describe_compressors()
    if json:
        echo_json(described)
    else:
        show.print_methods(described)


@app.command()
def demo(
    questions: Annotated[
        int | None,
        typer.Option(
            "--questions", min=1, metavar="N", help="Only the first N questions.", show_default=False
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show the whole job on the bundled model and a small corpus.

    Every question is answered by full prefill, without recompute, and by InfoFlow at 15 %, side by side.
    """
    session.quiet_bars()
    with Activity("loading the demo"):
        from kvloom import demo as demonstration
    with Activity("demo (questions)") as activity:
        report = demonstration.run(
            num_questions=questions,
            on_progress=activity.update,
            on_remark=remark,
            on_asked=(lambda _: None) if json else show.print_asked,
        )
    if json:
        echo_json(report.as_dict())
    else:
        show.print_demo_summary(report)
