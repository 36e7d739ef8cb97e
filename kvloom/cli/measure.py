"""What `kvloom eval` and `kvloom falsify` share: their options, and the way from names of sets and methods to
a folder of results.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import session
from kvloom.cli.output import Activity

if TYPE_CHECKING:
    from kvloom.eval.benchmark import Benchmark
    from kvloom.eval.runner import Method

Sets = Annotated[
    list[str],
    typer.Argument(metavar="SETS...", help="Names of sets, such as hotpotqa or needle:lengths=[500,1000]."),
]
RunFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the run; resumed if begun.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        envvar="KVLOOM_DATA",
        help="Folder of the sets; without it LongBench is read from the Hugging Face hub.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Samples per set.", show_default=False)
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context", min=1, metavar="N", help="Skip samples of a longer context.", show_default=False
    ),
]


def read_set(text: str, seed: int = 0) -> "Benchmark":
    """The set of ``NAME`` or ``NAME:OPTION=VALUE,...``; raises ``MethodError`` for an unknown one."""
    from kvloom.eval.benchmark import build
    from kvloom.eval.runner import split_method

    return build(*split_method(text), seed=seed)


def measure(
    model: str,
    sets: list[str],
    methods: list[str],
    out: Path,
    *,
    data: Path | None,
    limit: int | None,
    max_context: int | None,
    dtype: str | None,
    device: str | None,
    chunks: str = "passages",
    chunk_tokens: int = 2048,
    header: str = "shared",
    max_new_tokens: int = 0,
    seed: int = 0,
) -> "list[Method]":
    """Runs the methods on the sets, or goes on where the run in `out` stopped; returns the methods as they
    were run, with the layers that the model's profile has.
    """
    with Activity("starting"):
        from kvloom.eval.benchmark import take
        from kvloom.eval.runner import Method, Run, make_recipe, run
        from kvloom.loom import Loom
        from kvloom.profile import explicit_method
        from kvloom.prompt import PromptFormat
    for text in methods:
        Method.parse(text)  # what is wrong with it is found before a model is loaded
    benchmarks = [read_set(text, seed) for text in sets]
    samples = [take(benchmark, data, limit) for benchmark in benchmarks]
    prompt_format = PromptFormat(chunk_tokens=chunk_tokens, header=header)  # type: ignore[arg-type]
    with Activity(f"loading {model}"):
        session.check_device(device)
        loom = Loom.from_pretrained(
            model, store="memory:4GiB", dtype=dtype, device=device, prompt_format=prompt_format
        )
    ran = [Method.parse(explicit_method(text, loom.decoder)) for text in methods]
    recipe = make_recipe(
        loom,
        model,
        benchmarks,
        samples,
        ran,
        limit=limit,
        chunks=chunks,
        max_new_tokens=max_new_tokens,
        max_context=max_context,
    )
    folder = Run(out, recipe)
    with Activity("evaluating (samples)") as activity:
        run(loom, benchmarks, samples, ran, folder, recipe, on_progress=activity.update)
    return ran
