"""`kvloom falsify`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import session
from kvloom.cli.measure import Data, Limit, MaxContext, RunFolder, Sets, measure
from kvloom.cli.options import AsJson, Device, DtypeOption, Model
from kvloom.cli.output import Activity, console, count, echo_json, remark

if TYPE_CHECKING:
    from kvloom.eval.falsify import Findings


class Local(StrEnum):
    """Positions at which keys are left where their chunks were prefilled; see `kvloom.layout`."""

    hl_tp = "hl-tp"
    hl_hp = "hl-hp"
    tl_tp = "tl-tp"


def falsify(
    sets: Sets,
    out: RunFolder,
    model: Model = None,
    ratio: Annotated[
        float, typer.Option("--ratio", metavar="R", help="Share of the context rows to recompute.")
    ] = 0.15,
    local: Annotated[
        Local,
        typer.Option(
            "--local", help="Where keys stay and the question stands in the local run: head or tail."
        ),
    ] = Local.hl_tp,
    data: Data = None,
    limit: Limit = None,
    max_context: MaxContext = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Test whether it matters that keys are moved before rows are chosen.

    InfoFlow chooses once with keys at their global positions and once with keys left local, as in the
    authors' code. If both choose nearly the same rows, or close the same share of the KL gap, the paper's
    claim about rotary geometry falls. DIR is a run as of kvloom eval, and resumed like one.
    """
    name = session.need_model(model)
    with Activity("starting"):
        from kvloom.eval import falsify as test
        from kvloom.eval.journal import read_lines
    methods = test.methods(ratio, local.value)
    ran = measure(
        name,
        sets,
        methods,
        out,
        data=data,
        limit=limit,
        max_context=max_context,
        dtype=dtype,
        device=device,
    )
    found = test.findings(out, ran, local.value)
    skipped = len(read_lines(out / "skipped.jsonl"))
    if json:
        asked = {"out": str(out), "ratio": ratio, "local": local.value, "skipped": skipped}
        echo_json(asked | found.as_dict())
    else:
        print_findings(found, skipped)


def print_findings(found: "Findings", skipped: int) -> None:
    """How good each method is, the differences, and the verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from kvloom.eval.tables import gap, nats, percent, with_ends

    for text in found.remarks:
        remark(text)
    out = console()
    labels = {"global": "infoflow, global keys", found.local: f"infoflow, local keys ({found.local})"}
    quality = Table("", "KL gap closed", "same, first token", "KL", "rows", box=SIMPLE_HEAD)
    for what, row in found.rows.items():
        quality.add_row(
            labels.get(what, what),
            gap(row.gap, row.entry),
            gap(row.first_gap, row.entry),
            nats(row.kl),
            f"{row.rows:,.0f}",
        )
    pairs = Table("", "more of the gap closed", "p", box=SIMPLE_HEAD)
    for (first, second), difference in found.differences.items():
        pairs.add_row(
            f"{labels.get(first, first)}, than {labels.get(second, second)}",
            with_ends(difference),
            f"{difference.p_value:.4f}",
        )
    for table in (quality, pairs):
        for column in table.columns[1:]:
            column.justify = "right"
    out.print(Text(f"{count(found.num_samples, 'sample')}, {skipped:,} skipped as too long"))
    out.print(quality)
    out.print(pairs)
    chance = percent(found.chance)
    out.print(Text(f"shared rows of global and local keys: {with_ends(found.shared)}, by chance {chance}"))
    typer.echo(found.verdict)
