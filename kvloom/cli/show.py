"""Results as plain data for JSON, and as text and tables for people."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from kvloom.cli.output import console, count, remark, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvloom.demo import Asked, DemoReport
    from kvloom.prompt import Document
    from kvloom.trace import Answer, Trace
    from kvloom.verify import Report

STAGES = ("load", "prefill", "splice", "score", "recompute", "compress", "first_token")
"""The parts of the time to first token, in the order in which they happen."""


def answer_summary(question: str, documents: Sequence[Document], answer: Answer) -> dict[str, Any]:
    """What `kvloom ask` found, and how."""
    return {
        "question": question,
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "documents": [document.id for document in documents],
        "trace": answer.trace.as_dict(),
    }


def trace_line(trace: Trace, recipe: str) -> str:
    """Method, time to first token with its parts, and where the context's rows came from."""
    stages = parts(trace.as_dict()["seconds"])
    return (
        f"{recipe}: first token after {trace.seconds.ttft:.2f} s ({stages}); "
        f"{count(trace.reused_tokens, 'token')} reused, {trace.prefilled_tokens:,} prefilled, "
        f"{count(trace.recomputed_rows, 'row')} recomputed"
    )


def print_lookups(lookups: Sequence[Mapping[str, Any]]) -> None:
    """A line for the header and each chunk: hit or miss, where, how large, how long, and why."""
    for found in lookups:
        reason = f": {found['detail']}" if found["detail"] else ""
        told = f"miss, {found['reason']}{reason}"
        if found["hit"]:
            told = f"hit, {found['tier']}, {size(found['num_bytes'])} in {found['seconds'] * 1000:.1f} ms"
        remark(f"chunk {found['key'][:12]}, {count(found['num_tokens'], 'token')}: {told}")


def parts(seconds: Mapping[str, float]) -> str:
    """``load 0.08, score 0.61``: the stages that took time."""
    named = [(stage.replace("_", " "), seconds[stage]) for stage in STAGES if seconds[stage] > 0]
    return ", ".join(f"{stage} {taken:.2f}" for stage, taken in named)


def print_report(report: Report) -> None:
    """The checks, a table of methods, and the sentence."""
    from rich.table import Table

    layers = report.rotation_errors
    worst = max(range(len(layers)), key=layers.__getitem__)
    typer.echo(f"model          {report.model}")
    typer.echo(
        f"measured on    {count(report.num_questions, 'question')}, "
        f"{report.mean_context_tokens:,.0f} context tokens on average"
    )
    typer.echo(
        f"moved keys     relative error at most {layers[worst]:.1e} "
        f"(layer {worst} of 0 to {len(layers) - 1}), {report.moved_keys_error:.1e} in these prompts"
    )
    typer.echo(
        f"recompute all  differs from full prefill by {report.recompute_all_error:.1e} of the largest logit"
    )
    table = Table("method", "ratio", "KL mean", "KL worst", "same token", "rows", "TTFT / full")
    for column in table.columns[1:]:
        column.justify = "right"
    for method in report.methods:
        is_judged = method.method == report.judged
        table.add_row(
            f"{method.name} *" if is_judged else method.name,
            f"{method.ratio:.2f}",
            f"{method.mean_kl:.4f}",
            f"{method.worst_kl:.4f}",
            f"{method.top1_agreement:.0%}",
            f"{method.mean_rows:,.0f}",
            f"{method.mean_ttft_ratio:.2f}",
        )
    console().print(table)
    typer.echo(f"* judged: {report.judged}")
    typer.echo(("passed: " if report.passed else "not passed: ") + report.sentence)


def describe_methods() -> list[dict[str, Any]]:
    """Every registered selector: name, what it does, and its options with types and defaults."""
    from kvloom.selectors import selectors

    return [{"kind": "selector", **_describe(name, selectors[name])} for name in selectors]


def describe_compressors() -> list[dict[str, Any]]:
    """Every registered compressor likewise, and when it can be used."""
    from kvloom.compressors import compressors

    return [
        {
            "kind": "compressor",
            **_describe(name, compressors[name]),
            "phases": sorted(compressors[name].phases, reverse=True),
        }
        for name in compressors
    ]


_MEANINGS = {
    "selector": "Selectors, which rows of reused chunks are recomputed: -s NAME -o OPTION=VALUE",
    "compressor": "Compressors, which rows of a cache stay: -c NAME:OPTION=VALUE,...",
}


def print_methods(described: Sequence[Mapping[str, Any]]) -> None:
    """A paragraph for each method, by kind."""
    kind = ""
    for method in described:
        if method["kind"] != kind:
            typer.echo(("\n" if kind else "") + _MEANINGS[method["kind"]] + "\n")
            kind = method["kind"]
        typer.echo(f"{method['name']}: {method['description']}")
        for option in method["options"]:
            default = (
                "required"
                if option["required"]
                else f"default {'none' if option['default'] is None else option['default']}"
            )
            typer.echo(f"    {option['name']}=...  {option['type']}; {default}")


def _describe(name: str, cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    module = sys.modules[cls.__module__]
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return {
        "name": name,
        "description": (module.__doc__ or cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "),
        "options": [
            {
                "name": field.name,
                "type": type_text(hints[field.name]),
                "required": field.default is dataclasses.MISSING,
                "default": None if field.default is dataclasses.MISSING else field.default,
            }
            for field in fields
        ],
    }


def type_text(hint: Any) -> str:
    """A type as a user writes its values: ``question or suffix``, ``int or none``."""
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(type_text, get_args(hint)))
    if get_origin(hint) is tuple:
        inner = [type_text(part) for part in get_args(hint) if part is not Ellipsis]
        return f"[{', '.join(inner)}{', ...' if Ellipsis in get_args(hint) else ''}]"
    if hint is type(None):
        return "none"
    return {str: "text"}.get(hint, getattr(hint, "__name__", str(hint)))


def print_asked(asked: Asked) -> None:
    """A question of the demo: a table of what each method took, and the answers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    out = console()
    stages = [stage for stage in STAGES if stage != "prefill"]  # every passage was stored before
    out.print()
    out.print(Text(asked.question, style="bold"), Text(f"({' / '.join(asked.answers)})", style="dim"))
    table = Table("", "TTFT s", *(stage.replace("_", " ") for stage in stages), "rows", "KL", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for run in asked.runs:
        table.add_row(
            run.label,
            f"{run.seconds['ttft']:.2f}",
            *(f"{run.seconds[stage]:.2f}" if run.seconds[stage] else "" for stage in stages),
            f"{run.recomputed_rows:,}",
            f"{run.kl:.3f}",
        )
    out.print(table)
    answers = Table.grid(padding=(0, 1))
    for run in asked.runs:
        mark = Text("+", style="green") if run.is_right else Text("-", style="red")
        answers.add_row("", run.label, mark, Text(run.answer))
    out.print(answers)


def print_demo_summary(report: DemoReport) -> None:
    """One line per method over all questions, and how it was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print()
    summary = Table("", "TTFT, median s", "of full prefill", "KL, mean", "right", box=SIMPLE_HEAD)
    for column in summary.columns[1:]:
        column.justify = "right"
    for line in report.summary:
        summary.add_row(
            line.label,
            f"{line.median_ttft_s:.2f}",
            f"{line.median_ttft_ratio:.0%}",
            f"{line.mean_kl:.3f}",
            f"{line.num_right} of {line.num_questions}",
        )
    out.print(summary)
    out.print(Text(report.footnote))
