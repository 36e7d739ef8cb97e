"""Forward Influence (InfoKV, arXiv 2606.26875, Eq. 3): what later predictions owe to cached tokens.

A set S of rows is removed from the exact cache of a prefix, and a given continuation is run:

    FI(S; b)   = mean over tokens of chunk b of KL(p, q)      p over the full cache, q with S removed
    dNLL(S; b) = mean over the same tokens of log p(next) - log q(next)

Total effect: every later token is computed without S, as after an eviction. Direct effect: only the chunk's
own tokens are; they attend to earlier continuation tokens as the full cache has them. What lies between was
copied forward. Positions of the rows that stay do not change.

Deviations from the paper: sets are removed as a whole, beside single rows; a prefix of any length, with its
first tokens and its last queries kept; controls for position, layer, attention and chance (`influence_sets`).
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvloom.cache_probe import CacheProbe
from kvloom.errors import MethodError
from kvloom.eval.continuations import Distances, Reference, add_chunk, distances, follow, fork
from kvloom.eval.influence_sets import RemovalSet, Scores, mass, pick, stratified
from kvloom.eval.journal import Journal
from kvloom.eval.texts import CHUNK, TextRecipe, digest
from kvloom.observe import EntropyKind, Observer, Records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.eval.texts import TextDocument
    from kvloom.hf import Decoder
    from kvloom.loom import Loom

KEY = ("set", "document", "removed", "share", "effect")
EFFECTS = ("total", "direct")
SINGLE = "row "
"""Begins the name of what a single row's removal is called."""


@dataclass(frozen=True, kw_only=True)
class InfluenceRecipe(TextRecipe):
    """What decides a run's numbers."""

    removed: list[str]  # sets
    shares: list[float]
    effects: list[str]
    singles: int  # single rows of each document
    window: int  # last queries, whose attention is the score, and last rows, which stay
    seed: int


@dataclass(frozen=True, eq=False)
class Prefix:
    """A document's prefix, computed, and its continuation over the full cache."""

    decoder: Decoder
    cache: SplicedCache  # the prefix alone
    whole: SplicedCache  # with the continuation
    reference: Reference
    scores: Scores


def removal_sets(labels: Sequence[str], shares: Sequence[float]) -> list[RemovalSet]:
    """Every set at every share, those of no row once. Raises ``MethodError`` for one given twice."""
    for values in (labels, shares):
        if len(set(values)) < len(values):
            raise MethodError(f"a set or share is given twice: {', '.join(map(str, values))}")
    return list(dict.fromkeys(RemovalSet.parse(label, share) for label in labels for share in shares))


def make_recipe(
    loom: Loom,
    model: str,
    texts: Mapping[str, Sequence[TextDocument]],
    *,
    prefix: int,
    continuation: int,
    **options: Any,
) -> InfluenceRecipe:
    """The recipe of a run over the texts; `options` are the further fields of `InfluenceRecipe`."""
    return InfluenceRecipe(
        model=model,
        sets=list(texts),
        documents=max(map(len, texts.values())),
        prefix=prefix,
        continuation=continuation,
        fingerprint=loom.decoder.fingerprint,
        data={name: digest(documents) for name, documents in texts.items()},
        **options,
    )


def run(
    loom: Loom,
    texts: Mapping[str, Sequence[TextDocument]],
    recipe: InfluenceRecipe,
    folder: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Journal:
    """Fills the folder with what is not there yet; `on_progress(done, total)` counts results."""
    journal, wanted = Journal(folder, recipe, KEY), removal_sets(recipe.removed, recipe.shares)
    documents = [document for found in texts.values() for document in found]
    total = len(documents) * (len(wanted) + recipe.singles) * len(recipe.effects)
    for document in documents:
        done = [key for key in journal.done if key[:2] == (document.set, document.id)]
        if len(done) == total // len(documents):
            continue
        for line in measure(loom, document, wanted, recipe, journal.done):
            journal.write(line)
            if on_progress is not None:
                on_progress(len(journal.done), total)
    return journal


def measure(
    loom: Loom,
    document: TextDocument,
    wanted: Sequence[RemovalSet],
    recipe: InfluenceRecipe,
    done: set[tuple[Any, ...]],
) -> Iterator[dict[str, Any]]:
    """The result lines of one document that are not `done`."""
    seed = zlib.crc32(f"{recipe.seed}/{document.set}/{document.id}".encode())
    prefix = computed(loom.decoder, document.ids, recipe.prefix, recipe.window, seed)
    scores, num_layers = prefix.scores, loom.decoder.num_layers
    jobs: list[tuple[str, float, Tensor, range, bool, dict[str, Any]]] = []
    for one in wanted:
        rows, layers = pick(scores, one), one.layers(num_layers)
        jobs.append((one.label, one.share, rows, layers, one.score == "permuted", {}))
    features = {"entropy": scores.entropy, "attention": scores.attention, "value_norm": scores.value_norm}
    for row, cell in stratified(scores, recipe.singles).items():
        known = {"cell": cell} | {name: float(values[row]) for name, values in features.items()}
        jobs.append((f"{SINGLE}{row}", 0.0, torch.tensor([row]), range(num_layers), False, known))
    for effect in recipe.effects:
        for label, share, rows, layers, is_permuted, known in jobs:
            if (document.set, document.id, label, share, effect) in done:
                continue
            found = influence(prefix, rows, layers, effect, is_permuted=is_permuted)
            yield {
                "set": document.set,
                "document": document.id,
                "removed": label,
                "share": share,
                "effect": effect,
                "num_removed": rows.shape[-1],
                "mean_position": float(rows.double().mean()) if rows.numel() else None,
                "mass": mass(scores, rows.to(scores.seen.device), layers),
                **known,
                **asdict(found),
            }


def computed(decoder: Decoder, ids: Tensor, length: int, window: int, seed: int) -> Prefix:
    """The prefix of `length` tokens with its scores, and the continuation after it."""
    cache = decoder.new_cache(length)
    observer = Observer(decoder, cache, Records(entropy=EntropyKind(), window=window))
    observer.run(ids[:length])
    scores = Scores(CacheProbe(cache, observer), window, seed)
    whole = fork(decoder, cache)
    return Prefix(decoder, cache, whole, follow(decoder, whole, ids[length:]), scores)


def influence(
    prefix: Prefix, rows: Tensor, layers: range, effect: str, *, is_permuted: bool = False
) -> Distances:
    """What removing `rows` (m,), or (L, H, m), in `layers` changes, chunk by chunk."""

    def changed(cache: SplicedCache) -> SplicedCache:
        if is_permuted:
            return permuted(prefix.decoder, cache, prefix.cache.num_rows)
        return without(prefix.decoder, cache, rows, layers)

    if effect == "total":
        return distances(prefix.decoder, changed(prefix.cache), prefix.reference)
    found = Distances([], [], [])
    for chunk in range(prefix.reference.num_chunks):
        exact = fork(prefix.decoder, prefix.whole)
        exact.truncate(prefix.cache.num_rows + chunk * CHUNK)
        add_chunk(found, prefix.decoder, changed(exact), prefix.reference, chunk)
    return found


def without(decoder: Decoder, cache: SplicedCache, rows: Tensor, layers: range) -> SplicedCache:
    """A fork of an exact cache that lacks `rows` (m,), or (L, H, m), in `layers`."""
    twin = fork(decoder, cache)
    for layer in layers:
        num_heads = len(cache.keys(layer))
        removed = (rows if rows.ndim == 1 else rows[layer]).to(cache.device).expand(num_heads, -1)
        stays = torch.ones((num_heads, cache.num_rows), dtype=torch.bool, device=cache.device)
        stays.scatter_(1, removed, value=False)
        twin.keep(layer, stays.nonzero()[:, 1].view(num_heads, -1))
    return twin


def permuted(decoder: Decoder, cache: SplicedCache, num_rows: int) -> SplicedCache:
    """A fork that holds the same, its first `num_rows` rows in another order: only rounding differs."""
    twin = fork(decoder, cache)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    order = torch.cat([order, torch.arange(num_rows, cache.num_rows)]).to(cache.device)
    for layer in twin.layers:
        layer.fill(layer.keys[0][:, order], layer.values[0][:, order], None)
    twin.token_ids, twin.positions = cache.token_ids[order], cache.positions[order]
    return twin
