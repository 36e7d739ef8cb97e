"""``kvloom store``: look after the folder where KV is kept. No model is loaded."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.cli import stored
from kvloom.cli.failures import FAILURE
from kvloom.cli.options import AsJson, GroupHelp, Namespace, StoreUrl
from kvloom.cli.output import Activity, count, echo_json, remark, size
from kvloom.cli.stored import MIN_PREFIX, all_documents, find_document, only_key, open_shared
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from kvloom.store import Store, StoreStats

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_help_option=False)


@app.callback(invoke_without_command=True)
def store_group(ctx: typer.Context, help: GroupHelp = False) -> None:
    """Look after the place where KV is kept."""
    if help or ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


@app.command()
def stats(store: StoreUrl = None, namespace: Namespace = None, json: AsJson = False) -> None:
    """Count entries and bytes, without reading them."""
    held = open_shared(store, namespace).stats()
    if json:
        echo_json(asdict(held))
        return
    _show_stats(held)


def _show_stats(held: "StoreStats") -> None:
    rows = {
        "store": held.where,
        "entries": f"{held.entries:,}",
        "size": "not known" if held.num_bytes is None else size(held.num_bytes),
        "limit": "none" if held.limit_bytes is None else size(held.limit_bytes),
        "quarantined": f"{held.quarantined:,}",
        "pinned": f"{held.pinned:,}",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<12} {value}")
    for tier in held.tiers:
        entries = "does not answer" if tier.entries is None else _entries(tier.entries)
        detail = f"; {tier.detail}" if tier.detail else ""
        typer.echo(f"{'tier':<12} {tier.where}: {entries}, breaker {tier.breaker}{detail}")


@app.command("list")
def list_entries(
    documents: Annotated[
        bool, typer.Option("--documents", help="List documents instead: id, chunks, source.")
    ] = False,
    store: StoreUrl = None,
    namespace: Namespace = None,
    json: AsJson = False,
) -> None:
    """List entries: key, tokens, bytes, first position, codec, model."""
    opened = open_shared(store, namespace)
    if documents:
        _list_documents(opened, json)
        return
    heads = [head for key in opened.keys() if (head := opened.describe(key)) is not None]  # noqa: SIM118
    if json:
        echo_json([asdict(head) for head in heads])
        return
    if heads:
        typer.echo(f"{'key':<16}  {'tokens':>7}  {'size':>9}  {'start':>5}  {'codec':<9}  model")
    else:
        remark(f"nothing is stored in {opened.where}")
    for head in heads:
        typer.echo(
            f"{head.key[:16]}  {head.num_tokens:>7,}  {size(head.num_bytes):>9}  {head.start:>5}  "
            f"{head.codec:<9}  {head.fingerprint[:12]}"
        )


def _list_documents(store: "Store", json: bool) -> None:
    found = store.documents.all()
    if json:
        echo_json([asdict(document) for document in found])
        return
    width = max((len(document.id) for document in found), default=0)
    if found:
        typer.echo(f"{'id':<{width}}  {'chunks':>6}  source")
    for document in found:
        typer.echo(f"{document.id:<{width}}  {len(document.keys):>6,}  {document.source}".rstrip())


@app.command("rm")
def remove(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...", help=f"Document ids, or keys by their first {MIN_PREFIX} characters or more."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything; needs --yes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirms --all.")] = False,
    store: StoreUrl = None,
    namespace: Namespace = None,
    json: AsJson = False,
) -> None:
    """Remove documents with the chunks that are theirs alone, or entries.

    They are computed again when they are needed.
    """
    if everything == bool(keys):
        raise MethodError("name the entries to remove by their keys, or all of them with --all --yes")
    if everything and not yes:
        raise MethodError("--all removes every entry; confirm it with --yes")
    opened = open_shared(store, namespace)
    held = list(opened.keys())
    documents = [name for name in keys or [] if find_document(opened, name) is not None]
    if everything:
        documents = [document.id for document in all_documents(opened)]
    named = [only_key(name, held) for name in keys or [] if name not in documents]
    removed = [key for id in dict.fromkeys(documents) for key in opened.documents.remove(id).freed]
    removed += [key for key in dict.fromkeys(held if everything else named) if opened.delete(key)]
    if json:
        echo_json({"removed": removed, "documents": documents})
        return
    gone = f"{count(len(documents), 'document')} and " if documents else ""
    typer.echo(f"{gone}{_entries(len(removed))} removed")


@app.command()
def verify(store: StoreUrl = None, namespace: Namespace = None, json: AsJson = False) -> None:
    """Read every entry and set the damaged ones aside.

    The exit code is 1 when there was one, or one that cannot be read here, such as an entry of another key.
    """
    opened = open_shared(store, namespace)
    with Activity("reading (entries)") as activity:
        rejections = opened.verify(activity.update)
    result: dict[str, Any] = {"read": activity.done, "bad": [asdict(rejection) for rejection in rejections]}
    if json:
        echo_json(result)
    else:
        typer.echo(f"{_entries(activity.done)} read, {len(rejections):,} bad")
        left = [rejection for rejection in rejections if not rejection.set_aside]
        if left:
            remark(f"{len(left):,} left in place; the first {left[0].reason}")
    if rejections:
        raise typer.Exit(FAILURE)


def _entries(number: int) -> str:
    return f"{number:,} entr{'y' if number == 1 else 'ies'}"


for _command in (stored.add, stored.reindex, stored.show, stored.pin, stored.unpin, stored.rebuild):
    app.command()(_command)
