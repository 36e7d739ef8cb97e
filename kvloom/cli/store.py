"""``kvloom store``: look after the folder where KV is kept. No model is loaded."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli.failures import FAILURE
from kvloom.cli.options import AsJson, GroupHelp, StoreUrl, store_url
from kvloom.cli.output import Activity, count, echo_json, size
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from kvloom.store import Store

MIN_PREFIX = 6

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_help_option=False)


@app.callback(invoke_without_command=True)
def store_group(ctx: typer.Context, help: GroupHelp = False) -> None:
    """Look after the place where KV is kept."""
    if help or ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


@app.command()
def stats(store: StoreUrl = None, json: AsJson = False) -> None:
    """Count entries and bytes, without reading them."""
    held = _open(store).stats()
    if json:
        echo_json(asdict(held))
        return
    rows = {
        "store": held.where,
        "entries": f"{held.entries:,}",
        "size": "not known" if held.num_bytes is None else size(held.num_bytes),
        "limit": "none" if held.limit_bytes is None else size(held.limit_bytes),
        "quarantined": f"{held.quarantined:,}",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12} {value}")


@app.command("list")
def list_entries(store: StoreUrl = None, json: AsJson = False) -> None:
    """List entries: key, tokens, bytes, first position, model."""
    opened = _open(store)
    heads = [head for key in opened.keys() if (head := opened.describe(key)) is not None]  # noqa: SIM118
    if json:
        echo_json([asdict(head) for head in heads])
        return
    if heads:
        typer.echo(f"{'key':<16}  {'tokens':>7}  {'size':>9}  {'start':>5}  model")
    for head in heads:
        typer.echo(
            f"{head.key[:16]}  {head.num_tokens:>7,}  {size(head.num_bytes):>9}  {head.start:>5}  "
            f"{head.fingerprint[:12]}"
        )


@app.command("rm")
def remove(
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY...", help=f"Keys, or their first {MIN_PREFIX} characters or more."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries; needs --yes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirms --all.")] = False,
    store: StoreUrl = None,
    json: AsJson = False,
) -> None:
    """Remove entries; they are computed again when they are needed."""
    if everything == bool(keys):
        raise MethodError("name the entries to remove by their keys, or all of them with --all --yes")
    if everything and not yes:
        raise MethodError("--all removes every entry; confirm it with --yes")
    opened = _open(store)
    held = list(opened.keys())
    chosen = held if everything else [_only(key, held) for key in keys or []]
    removed = [key for key in dict.fromkeys(chosen) if opened.delete(key)]
    if json:
        echo_json({"removed": removed})
    else:
        typer.echo(f"{_entries(len(removed))} removed")


@app.command()
def verify(store: StoreUrl = None, json: AsJson = False) -> None:
    """Read every entry and set the damaged ones aside.

    The exit code is 1 when there was one.
    """
    opened = _open(store)
    with Activity("reading (entries)") as activity:
        rejections = opened.verify(activity.update)
    result: dict[str, Any] = {"read": activity.done, "bad": [asdict(rejection) for rejection in rejections]}
    if json:
        echo_json(result)
    else:
        typer.echo(f"{_entries(activity.done)} read, {len(rejections):,} bad")
    if rejections:
        raise typer.Exit(FAILURE)


def _open(url: str | None) -> "Store":
    url = store_url(url, shared=True)
    from kvloom.store import open_store

    return open_store(url)


def _only(prefix: str, keys: list[str]) -> str:
    """The one key that begins with `prefix`; ``MethodError`` for none, several, or too short a prefix."""
    if len(prefix) < MIN_PREFIX:
        raise MethodError(f"key {prefix!r} is too short; give at least its first {MIN_PREFIX} characters")
    found = [key for key in keys if key.startswith(prefix.lower())]
    if not found:
        raise MethodError(f"no entry's key begins with {prefix!r}; see kvloom store list")
    if len(found) > 1:
        raise MethodError(f"{count(len(found), 'key')} begin with {prefix!r}; give more characters")
    return found[0]


def _entries(number: int) -> str:
    return f"{number:,} entr{'y' if number == 1 else 'ies'}"
