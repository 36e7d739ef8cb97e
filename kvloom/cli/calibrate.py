"""`kvloom calibrate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvloom.cli import session
from kvloom.cli.options import AsJson, Device, DtypeOption, Model, check_source
from kvloom.cli.output import Activity, console, count, echo_json, remark
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from kvloom.profile import Profile, Scores

BAR_WIDTH = 20


def calibrate(
    model: Model = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to hide facts in, .txt or .md; repeatable; by default the demo's passages.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Needle and multi-hop prompts, each.")
    ] = 24,
    length: Annotated[
        int, typer.Option("--length", metavar="TOKENS", help="Of the documents of a prompt, about.")
    ] = 1000,
    ratio: Annotated[
        float, typer.Option("--ratio", metavar="R", help="Share of rows at which recall is measured.")
    ] = 0.15,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write the profile; by default where later runs find and use it.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: Device = None,
    json: AsJson = False,
) -> None:
    """Find the layers that InfoFlow should score on this model.

    Facts are hidden in a text, and each layer is judged by how high its attention ranks their tokens. The
    best band of layers is saved for this model if it beats the default on prompts that did not choose it.
    Later runs use it wherever InfoFlow is named without the option layers; KVLOOM_PROFILE=off prevents that.
    """
    name = session.need_model(model)
    for source in text or []:
        check_source(source)
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise MethodError(
            f"--out {out} is not a file in a folder that exists; name one, such as profile.json"
        )
    with Activity("starting"):
        from kvloom.eval.calibration import Plan
        from kvloom.eval.calibration import calibrate as measure
    plan = Plan(samples=samples, length=length, ratio=ratio, seed=seed)
    haystack = _read(text)
    loom = session.open_loom(name, "memory:4GiB", 1024, dtype, device)
    with Activity("calibrating (prompts)") as activity:
        profile = measure(loom, name, haystack, plan, on_progress=activity.update)
    written = profile.save(out)
    if json:
        echo_json(profile.as_dict())
    else:
        print_profile(profile)
    remark(
        f"written: {written}"
        + ("" if out else f"; from now on infoflow scores layers {profile.layers} on this model")
    )


def _read(sources: list[str] | None) -> str:
    """The texts of the files, each once, or the passages of the demo."""
    if not sources:
        from kvloom.demo import corpus

        documents = corpus()[0]
    else:
        from kvloom.documents import load_documents

        documents = [document for source in sources for document in load_documents(source)]
    return "\n\n".join(dict.fromkeys(document.text for document in documents))


def print_profile(profile: "Profile") -> None:
    """Every layer alone, the candidates on the held-out samples, and the choice."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from kvloom.selectors.infoflow import resolve_layers

    out, held_out = console(), profile.held_out
    chosen = resolve_layers(profile.layers, profile.num_layers)
    measures = ("needle recall", "AP", "multi-hop recall", "AP", "mean AP")
    table = Table("layer", *measures, "", "", box=SIMPLE_HEAD)
    most = max(scores.ap for scores in profile.per_layer)
    for layer, scores in enumerate(profile.per_layer):
        bar = "█" * round(BAR_WIDTH * scores.ap / most)
        table.add_row(str(layer), *_figures(scores), bar, "*" if layer in chosen else "")
    unseen = Table("", "layers", *measures, box=SIMPLE_HEAD)
    for label, scores in (
        ("best band", held_out.best),
        ("default", held_out.default),
        ("paper's band", held_out.paper),
    ):
        resolved = resolve_layers(scores.layers, profile.num_layers)
        unseen.add_row(label, f"{scores.layers} ({resolved[0]}-{resolved[-1]})", *_figures(scores))
    for column in (*table.columns[:6], *unseen.columns[2:]):
        column.justify = "right"
    recipe = profile.recipe
    for part in (
        Text(
            f"{profile.model}: each layer alone, {count(recipe['samples'], 'sample')} of either kind, "
            f"{recipe['mean_context_tokens']:,.0f} context tokens; recall among the rows recomputed at "
            f"{recipe['ratio']:.0%}"
        ),
        table,
        Text(f"the {count(held_out.samples, 'sample')} that had no part in the choice"),
        unseen,
        Text(f"* {profile.layers}: {profile.why}"),
    ):
        out.print(part)


def _figures(scores: "Scores") -> tuple[str, ...]:
    values = (scores.needle_recall, scores.needle_ap, scores.multihop_recall, scores.multihop_ap, scores.ap)
    return tuple(f"{value:.3f}" for value in values)
