"""``kvloom bench``: seconds and bytes, beside transformers and the bound of the arithmetic."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import session
from kvloom.cli.bench_tables import print_tables
from kvloom.cli.options import AsJson, Device, DtypeOption, GroupHelp
from kvloom.cli.output import Activity, echo_json, remark
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from kvloom.loom import Loom

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_help_option=False)

BenchModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="KVLOOM_MODEL",
        help="Model folder, hub name, bundled:smollm2, or random weights of a known shape: random:llama-8b, "
        "random:qwen3-0.6b, random:toy.",
        show_default=False,
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        "--lengths", metavar="N,...", help="Tokens of the prompt; 2K is 2048; what does not fit is skipped."
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, metavar="N", help="Rounds that count, of interleaved runs.")
]
ChunkLength = Annotated[
    int, typer.Option("--chunk-tokens", min=32, metavar="N", help="Tokens of a chunk, about.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder for the JSON and the plot.", show_default=False),
]


@app.callback(invoke_without_command=True)
def bench_group(ctx: typer.Context, help: GroupHelp = False) -> None:
    """Measure speed and memory, beside transformers and what the arithmetic allows."""
    if help or ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


@app.command()
def ttft(
    model: BenchModel = None,
    lengths: Lengths = "1K,2K,4K,7K",
    ratios: Annotated[
        str, typer.Option("--ratios", metavar="R,...", help="Shares of rows that are computed again.")
    ] = "0.05,0.15,0.3",
    methods: Annotated[
        str,
        typer.Option("--methods", metavar="NAME,...", help="Selectors, and transformers for its generate."),
    ] = "transformers,full,none,infoflow,cacheblend,epic",
    repeats: Repeats = 3,
    chunk_tokens: ChunkLength = 512,
    out: Out = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Time to first token and its parts, chunks in memory and on disk.

    Every part stands beside the least time that its arithmetic and its bytes take at the rates of this
    machine, measured in the same run; docs/benchmarks.md has the formulas.
    """
    name = session.need_model(model)
    tokens, shares = read_lengths(lengths), read_ratios(ratios)
    with Activity("starting"):
        from kvloom.bench import ttft as bench
        from kvloom.bench.measure import write_json
    bench.ways(read_names(methods), shares)  # what is wrong with them is found before a model is loaded
    check_folder(out, with_plot=True)
    loom = open_loom(name, chunk_tokens, dtype, device)
    with Activity("measuring (runs)") as activity:
        found = bench.run(
            name,
            loom,
            lengths=tokens,
            methods=read_names(methods),
            ratios=shares,
            repeats=repeats,
            chunk_tokens=chunk_tokens,
            on_progress=activity.update,
            on_length=None if out is None else lambda so_far: write_json(out, so_far),
        )
    finish(found, out, json)


@app.command()
def index(
    model: BenchModel = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            metavar="N,...",
            help="Tokens of all chunks, which are whole, so some more; 2K is 2048.",
        ),
    ] = "2K,4K",
    repeats: Repeats = 3,
    chunk_tokens: ChunkLength = 512,
    out: Out = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Tokens a second of indexing, beside transformers' forward of the same chunks one by one."""
    name, tokens = session.need_model(model), read_lengths(lengths)
    check_folder(out)
    loom = open_loom(name, chunk_tokens, dtype, device)
    with Activity("measuring (runs)") as activity:
        from kvloom.bench import index as bench

        found = bench.run(
            name,
            loom,
            lengths=tokens,
            repeats=repeats,
            chunk_tokens=chunk_tokens,
            on_progress=activity.update,
        )
    finish(found, out, json)


@app.command()
def decode(
    model: BenchModel = None,
    lengths: Lengths = "512,1K,2K,4K",
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Tokens of each run that count.")
    ] = 16,
    repeats: Repeats = 3,
    out: Out = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Milliseconds a token, beside transformers' generate with its dynamic and its static cache."""
    name, tokens = session.need_model(model), read_lengths(lengths)
    check_folder(out)
    loom = open_loom(name, 512, dtype, device)
    with Activity("measuring (runs)") as activity:
        from kvloom.bench import decode as bench

        found = bench.run(
            name, loom, lengths=tokens, repeats=repeats, steps=steps, on_progress=activity.update
        )
    finish(found, out, json)


@app.command()
def memory(
    model: BenchModel = None,
    lengths: Lengths = "2K",
    ratio: Annotated[
        float, typer.Option("--ratio", min=0.0, max=1.0, metavar="R", help="Share of rows computed again.")
    ] = 0.15,
    methods: Annotated[
        str,
        typer.Option("--methods", metavar="NAME,...", help="Selectors, and transformers for its generate."),
    ] = "transformers,full,none,infoflow",
    chunk_tokens: ChunkLength = 512,
    out: Out = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Most memory held during an answer, against the model and one copy of the KV.

    Each method answers in a process of its own, with chunks on disk.
    """
    name, tokens = session.need_model(model), read_lengths(lengths)
    with Activity("starting"):
        from kvloom.bench import memory as bench
        from kvloom.bench.models import check_name
        from kvloom.bench.ttft import ways
    ways(read_names(methods), [ratio])
    check_folder(out)
    check_name(name)
    session.check_device(device)
    with Activity("measuring (answers)") as activity:
        found = bench.run(
            name,
            lengths=tokens,
            methods=read_names(methods),
            ratio=ratio,
            chunk_tokens=chunk_tokens,
            dtype=dtype,
            device=device,
            on_progress=activity.update,
        )
    finish(found, out, json)


def read_lengths(text: str) -> list[int]:
    """Tokens of ``1K,2048``, ascending; raises ``MethodError``."""
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)([kK]?)", part.strip())
        if match is None:
            raise MethodError(f"a length is a number of tokens such as 512 or 2K, got {part.strip()!r}")
        found.add(int(match[1]) * (1024 if match[2] else 1))
    return sorted(found)


def read_ratios(text: str) -> list[float]:
    """Shares of ``0.05,0.15``, ascending; raises ``MethodError``."""
    found = set()
    for part in text.split(","):
        try:
            share = float(part)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise MethodError(f"a ratio is a share of rows from 0 to 1, such as 0.15, got {part.strip()!r}")
        found.add(share)
    return sorted(found)


def read_names(text: str) -> list[str]:
    """The names between commas."""
    return [part.strip() for part in text.split(",") if part.strip()] or [text]


def check_folder(out: Path | None, *, with_plot: bool = False) -> None:
    """Makes the folder; raises ``EvalError`` where it cannot be written to, or nothing can be drawn."""
    if out is None:
        return
    from kvloom.bench.measure import prepare_folder

    prepare_folder(out)
    if with_plot:
        from kvloom.eval.plots import require_matplotlib

        require_matplotlib()


def open_loom(name: str, chunk_tokens: int, dtype: str | None, device: str | None) -> "Loom":
    """The model over a store in memory, whose chunks are never split."""
    with Activity(f"loading {name}"):
        from kvloom.bench.models import STORE, check_name, open_model

        check_name(name)
        session.check_device(device)
        return open_model(
            name, chunk_tokens=max(1024, 2 * chunk_tokens), store=STORE, dtype=dtype, device=device
        )


def finish(found: Mapping[str, Any], out: Path | None, json: bool) -> None:
    """Writes the files, if asked for, and prints the tables or the JSON."""
    for skipped in found.get("skipped", ()):
        remark(f"skipped: {skipped['why']}")
    if out is not None:
        from kvloom.bench.measure import write_json

        remark(f"written: {write_json(out, found)}")
        if found["bench"] == "ttft":
            from kvloom.bench.draw import write_plot

            remark(f"written: {write_plot(out, found)}")
    if json:
        echo_json(found)
        return
    print_tables(found)
