"""The tables of ``kvloom bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvloom.cli.output import console, count, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def print_tables(found: Mapping[str, Any]) -> None:
    """A table for each length, and a line on the machine."""
    lengths = list(dict.fromkeys(line["length"] for line in found["results"]))
    for length in lengths:
        TABLES[found["bench"]](length, [line for line in found["results"] if line["length"] == length])
    rates = found.get("rates", {}).get(str(lengths[-1]))
    machine = f"{found['model']}, {found['dtype']}, {found['device']}, {found['threads']} threads"
    if rates:
        most = max(rates["matmul_flops_s"].values())
        machine += (
            f"; at {lengths[-1]:,} tokens this machine multiplied at up to {most / 1e9:,.0f} GFLOP/s, read "
            f"{rates['read_bytes_s'] / 1e9:,.1f} and copied {rates['copy_bytes_s'] / 1e9:,.1f} GB/s"
        )
    typer.echo(machine)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose columns but the first are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console().print(table)


def ms(seconds: float) -> str:
    """Milliseconds, with a decimal where there are few."""
    return f"{1000 * seconds:,.1f}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def share(number: float | None) -> str:
    """Per cent, or nothing."""
    return "" if number is None else f"{number:.1%}"


def times(number: float | None) -> str:
    """A quotient, or nothing."""
    return "" if number is None else f"{number:.2f}"


def part_of(part: Mapping[str, Any] | None) -> str:
    """Milliseconds of a part and how many times its bound, where it has one."""
    if part is None:
        return ""
    return ms(part["seconds"]) + (f" {times(part['quotient'])}x" if part["quotient"] else "")


def print_ttft(length: int, lines: Sequence[Mapping[str, Any]]) -> None:
    from kvloom.bench.draw import label
    from kvloom.bench.ttft import PARTS

    columns = ("method", "rows", "TTFT ms", "least", "most", "of full", "bound ms", "of full", "x bound")
    rows = []
    for line in lines:
        taken = [ms(line["ttft_s"][name]) for name in ("median", "low", "high")]
        bound = [ms(line["bound_s"]), share(line["bound_of_full"]), times(line["quotient"])]
        rows.append([label(line), f"{line['rows']:,}", *taken, share(line["of_full"]), *bound])
    print_table(f"{length:,} tokens, KV {size(lines[0]['kv_bytes'])}", columns, rows)
    columns = ("method", *(f"{part} ms" for part in PARTS), "rest ms")
    rows = [
        [
            label(line),
            *(part_of(line["parts"].get(part)) for part in PARTS),
            ms(line["parts"]["rest"]["seconds"]),
        ]
        for line in lines
    ]
    print_table("of which, and times the bound of the part", columns, rows)


def print_index(length: int, lines: Sequence[Mapping[str, Any]]) -> None:
    columns = ("way", "tokens/s", "seconds", "least", "most", "of transformers", "bound", "x bound")
    rows = [
        [
            line["method"],
            f"{line['tokens_per_s']:,.0f}",
            *(f"{line['seconds'][name]:.3f}" for name in ("median", "low", "high")),
            share(line["of_transformers"]),
            f"{line['bound_tokens_per_s']:,.0f}",
            times(line["quotient"]),
        ]
        for line in lines
    ]
    print_table(f"{lines[0]['tokens']:,} tokens in {count(lines[0]['num_chunks'], 'chunk')}", columns, rows)


def print_decode(length: int, lines: Sequence[Mapping[str, Any]]) -> None:
    columns = ("way", "ms a token", "least", "most", "of dynamic", "bound ms", "x bound")
    rows = [
        [
            line["method"],
            *(f"{line['ms'][name]:.2f}" for name in ("median", "low", "high")),
            share(line["of_dynamic"]),
            f"{line['bound_ms']:.2f}",
            times(line["quotient"]),
        ]
        for line in lines
    ]
    print_table(f"after {length:,} tokens, KV {size(lines[0]['kv_bytes'])}", columns, rows)


def print_memory(length: int, lines: Sequence[Mapping[str, Any]]) -> None:
    from kvloom.bench.draw import share_of

    columns = ("method", "before", "peak", "grown", "model", "KV", "grown / KV", "x model + KV")
    rows = [
        [
            f"{line['method']}{share_of(line)}{'' if line['is_exact'] else ' (of the whole process)'}",
            *(size(line[f"{name}_bytes"]) for name in ("before", "peak", "grown", "model", "kv")),
            times(line["kv_copies"]),
            times(line["quotient"]),
        ]
        for line in lines
    ]
    print_table(f"an answer of a few tokens after {length:,}", columns, rows)


TABLES = {"ttft": print_ttft, "index": print_index, "decode": print_decode, "memory": print_memory}
