"""`kvloom compress`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import session
from kvloom.cli.options import AsJson, Device, DtypeOption, Model, decode
from kvloom.cli.output import Activity, console, count, echo_json, remark, size
from kvloom.errors import MethodError, PromptError

if TYPE_CHECKING:
    from rich.table import Table

CompressorNames = Annotated[
    list[str] | None,
    typer.Option(
        "--compressor",
        "-c",
        metavar="NAME[:OPTION=VALUE,...]",
        help="A compressor with its options; repeatable; infokv if none is named.",
        show_default=False,
    ),
]


def compress(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text that is the prompt, or - for stdin.")],
    model: Model = None,
    compressor: CompressorNames = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="Option of every compressor named, such as keep=0.4; repeatable.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="The text as it is; else it is a user's turn of a chat.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=0, metavar="N", help="Also answer, greedily; 0: do not.")
    ] = 0,
    decode_compressor: Annotated[
        str | None,
        typer.Option(
            "--decode-compressor",
            "-d",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Compresses the answer while it grows.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the compressed cache to go on with.", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=0, metavar="N", help="Also time N decode steps over either cache; 0: do not."
        ),
    ] = 0,
    layers: Annotated[bool, typer.Option("--layers", help="Show what each layer keeps.")] = False,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Compress the KV cache of a prompt, and say what is kept, in how many bytes.

    Each compressor gets a prefill of its own, in which what it looks at is recorded.
    """
    name = session.need_model(model)
    check_wishes(compressor, max_new_tokens, decode_compressor, save)
    text = read_prompt(file)
    with Activity("starting"):
        from dataclasses import replace

        from kvloom.eval.compressing import check_different, compress_prompt, parse_rival
        from kvloom.registry import parse_options
        from kvloom.turns import turn_ids
    shared = parse_options(option or [])
    rivals = [parse_rival(named, shared) for named in compressor or ["infokv"]]
    check_different(rivals)
    growing = None
    if decode_compressor is not None:
        growing = parse_rival(decode_compressor, phase="decode").compressor
    loom = session.open_loom(name, "memory:", 1024, dtype, device)
    prompt_format = replace(loom.prompt_format, chat=not plain)
    ids = turn_ids(loom.tokenizer, prompt_format, text, is_first=True)
    with Activity("compressing"):
        rows = compress_prompt(
            loom, ids, rivals, max_new_tokens=max_new_tokens, decode=growing, save=save, steps=steps
        )
    if json:
        echo_json({"prompt_tokens": len(ids), "layers": loom.decoder.num_layers, "methods": rows})
        return
    print_rows(rows, with_layers=layers)
    if save is not None:
        remark(f"written: {save}")


def check_wishes(
    compressors: Sequence[str] | None, max_new_tokens: int, decode_compressor: str | None, save: Path | None
) -> None:
    """Raises ``MethodError`` for options that do not go together."""
    if decode_compressor is not None and not max_new_tokens:
        raise MethodError("-d compresses an answer while it grows; ask for one with --max-new-tokens")
    if save is None:
        return
    if len(compressors or []) > 1:
        raise MethodError(
            f"--save writes one cache, {len(compressors or [])} compressors are named; name one"
        )
    if save.is_dir() or not save.absolute().parent.is_dir():
        raise MethodError(f"--save {save} is not a file in a folder that exists; name one")


def read_prompt(file: str) -> str:
    """The text of the file, or of standard input for ``-``; raises ``PromptError``."""
    if file == "-":
        raw, what = sys.stdin.buffer.read(), "the prompt on standard input"
    else:
        what = file
        try:
            raw = Path(file).read_bytes()
        except FileNotFoundError:
            raise PromptError(f"{file} does not exist; give a text file, or - for standard input") from None
        except OSError as error:
            raise PromptError(f"{file} cannot be read: {error.strerror}; give a text file") from None
    text = decode(raw, what)
    if not text.strip():
        raise PromptError(f"{what} is empty; write a prompt")
    return text


def print_rows(rows: Sequence[Mapping[str, Any]], *, with_layers: bool) -> None:
    """A table with a line for each method, and what there is to say about them below."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(
        *("compressor", "tokens", "kept a layer", "before", "after", "of it", "prefill s", "compress s"),
        box=SIMPLE_HEAD,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['tokens']:,}",
            as_range(row["kept"]),
            size(row["bytes_before"]),
            size(row["bytes_after"]),
            f"{row['bytes_after'] / row['bytes_before']:.1%}",
            f"{row['prefill_s']:.2f}",
            f"{row['compress_s']:.2f}",
        )
    out.print(table)
    if any("speed" in row for row in rows):
        for shown in speed_tables(rows):
            out.print(shown)
        out.print(Text(SPEED_NOTE))
    if with_layers:
        kept = Table("layer", *(row["method"] for row in rows), box=SIMPLE_HEAD)
        for column in kept.columns[1:]:
            column.justify = "right"
        for layer, places in enumerate(zip(*(row["kept"] for row in rows), strict=True)):
            kept.add_row(str(layer), *(f"{number:,}" for number in places))
        out.print(kept)
    for row in rows:
        if row["note"]:
            out.print(Text(f"{row['method']}: {row['note']}"))
        if "answer" in row:
            out.print(Text(f"{row['method']}, {answered(row)}:", style="bold"))
            out.print(Text(row["answer"]))


SPEED_NOTE = (
    "cost: recording and compressing as a share of a plain prefill, the language-model head over all tokens, "
    "which the entropy needs, apart; peak: memory while compressing, beyond the cache; medians."
)


def speed_tables(rows: Sequence[Mapping[str, Any]]) -> "list[Table]":
    """What compressing costs, and what a decode step takes before and after."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    costs = ("compressor", "prefill s", "record s", "compress s", "cost", "head s", "cost of head", "peak")
    cost, step = (
        Table(*costs, box=SIMPLE_HEAD),
        Table("compressor", "step ms", "after", "of it", box=SIMPLE_HEAD),
    )
    for table in (cost, step):
        for column in table.columns[1:]:
            column.justify = "right"
    for row in rows:
        found = row["speed"]
        cost.add_row(
            row["method"],
            *(f"{found[name]:.2f}" for name in ("prefill_s", "record_s", "compress_s")),
            f"{found['share_less_head']:.1%}",
            f"{found['head_s']:.2f}",
            f"{found['head_s'] / found['prefill_s']:.1%}",
            size(found["peak_bytes"]),
        )
        times = found["full_ms"], found["compressed_ms"]
        step.add_row(row["method"], *(f"{ms:.1f}" for ms in times), f"{times[1] / times[0]:.1%}")
    return [cost, step]


def as_range(kept: Sequence[int]) -> str:
    """Places by layer in short: ``410``, or ``38-820``."""
    least, most = min(kept), max(kept)
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"


def answered(row: Mapping[str, Any]) -> str:
    """How an answer came about."""
    told = f"{count(row['new_tokens'], 'token')} in {row['decode_s']:.1f} s"
    times = row["decode_compressions"]
    if times:
        told += f", compressed {count(len(times), 'time')} while it grew"
    return f"{told}, cache {size(row['bytes_at_end'])} at the end"
