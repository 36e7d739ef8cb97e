"""compress: the best places of each layer stay, all others are dropped and their memory freed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvloom.cache_probe import CacheProbe
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvloom.cache import SplicedCache
    from kvloom.compressors.base import Compressor, Growing
    from kvloom.observe import Observer


@dataclass(frozen=True)
class Compression:
    """What one compression did."""

    method: str  # the exact recipe: repr of the compressor
    num_rows: int  # rows that the cache ever held
    budget: int  # places that a layer of equal share was to keep
    held: list[int]  # places by layer, before
    kept: list[int]  # places by layer, after
    bytes_before: int
    bytes_after: int
    note: str = ""  # why nothing, or more than was asked for, was kept

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def compress(
    compressor: Compressor,
    cache: SplicedCache,
    observer: Observer,
    *,
    protect: Sequence[range] = (),
    num_apart: int = 0,
) -> Compression:
    """Drops all but the share `keep` of the tokens of a prompt, in every layer; keys keep their positions.

    The share is of all tokens the cache ever held, so that a second call, after more tokens, leaves the same
    share of the whole. Rows in `protect` stay, as do those the method itself protects; where these alone are
    more than the budget, the budget is what they take and one more, and the note says so. ``keep=1`` changes
    no bit. Ties go to the earlier place. The first `num_apart` rows stay and are not counted: the share is of
    the others.
    """
    probe = CacheProbe(cache, observer)
    num_rows = probe.num_rows
    stays = compressor.protected(probe)
    for rows in (range(num_apart), *protect):
        if not 0 <= rows.start <= rows.stop <= num_rows:
            raise MethodError(f"protected rows {rows.start}..{rows.stop} lie outside the cache's {num_rows}")
        stays[rows.start : rows.stop] = True
    floor = min(num_rows, int(stays.sum()) + 1)
    wanted = num_apart + int(compressor.keep * (num_rows - num_apart) + 1e-9)
    budget = max(wanted, floor)
    note = ""
    if budget >= num_rows > wanted:
        note = f"not compressed: {num_rows} tokens, of which {int(stays.sum())} are protected"
    elif budget > wanted:
        note = (
            f"kept {budget} tokens instead of {wanted}: {int(stays.sum())} are protected, and one more stays"
        )
    budgets = [budget] * probe.num_layers
    if budget < num_rows:
        budgets = _within(floor, num_rows, compressor.budgets(probe, budget))
    return _apply(compressor, probe, cache, observer, stays, budgets, budget, note)


def _within(least: int, most: int, budgets: list[int]) -> list[int]:
    """The budgets from `least` to `most`; what small ones gain by that is taken from the largest."""
    bounded = [max(least, min(budget, most)) for budget in budgets]
    while sum(bounded) > sum(budgets) and max(bounded) > least:
        bounded[bounded.index(max(bounded))] -= 1
    return bounded


def compress_generated(
    compressor: Growing, cache: SplicedCache, observer: Observer, *, num_prompt: int, budget: int
) -> Compression:
    """Drops generated rows but `budget` of them and the last `recent`, in every layer, as RPC does (NeurIPS
    2025); the prompt's rows, the first `num_prompt`, stay as they are.
    """
    last = cache.num_rows - compressor.recent
    probe = CacheProbe(cache, observer, phase="decode", candidates=range(num_prompt, last))
    stays = torch.ones(cache.num_rows, dtype=torch.bool)
    stays[num_prompt:last] = False
    budgets = []
    for layer in range(probe.num_layers):
        num_candidates = int(probe.is_candidate(layer).sum(-1).max())
        budgets.append(probe.held(layer) - num_candidates + min(budget, num_candidates))
    return _apply(compressor, probe, cache, observer, stays, budgets, budget + compressor.recent, "")


@torch.no_grad()
def _apply(
    compressor: Compressor,
    probe: CacheProbe,
    cache: SplicedCache,
    observer: Observer,
    stays: Tensor,
    budgets: list[int],
    budget: int,
    note: str,
) -> Compression:
    """All layers are scored before any drops a row, so that a method that fails leaves the cache whole."""
    held, before = [probe.held(layer) for layer in range(probe.num_layers)], cache.num_bytes
    places = {
        layer: best_places(
            _checked(compressor, probe, layer), stays.to(cache.device)[probe.rows(layer)], number
        )
        for layer, number in enumerate(budgets)
        if number < held[layer]
    }
    for layer, kept in places.items():
        cache.keep(layer, kept)
        observer.keep(layer, kept.expand(cache.keys(layer).shape[0], -1))
    return Compression(
        method=repr(compressor),
        num_rows=probe.num_rows,
        budget=budget,
        held=held,
        kept=[probe.held(layer) for layer in range(probe.num_layers)],
        bytes_before=before,
        bytes_after=cache.num_bytes,
        note=note,
    )


def _checked(compressor: Compressor, probe: CacheProbe, layer: int) -> Tensor:
    score = compressor.score(probe, layer)
    num_heads, held = probe.keys(layer).shape[:2]
    if score.shape not in ((num_heads, held), (1, held)):
        raise MethodError(
            f"{compressor.name}: score of layer {layer} has shape {tuple(score.shape)}, it must be "
            f"({num_heads}, {held}) or (1, {held})"
        )
    if score.isnan().any():
        raise MethodError(
            f"{compressor.name}: score of layer {layer} is not a number for {int(score.isnan().sum())} places"
        )
    return score


def best_places(score: Tensor, stays: Tensor, number: int) -> Tensor:
    """(H, number) int64 ascending: the places that stay, (T,) or (H, T) bool, and the best-scored (H, T) of
    the others; ties go to the earlier place.
    """
    if stays.ndim == 2 and len(score) == 1:
        score = score.expand(len(stays), -1)
    finite = score.float().clamp(max=torch.finfo(torch.float32).max)  # nothing ranks with what stays
    ranked = finite.masked_fill(stays.expand_as(score), torch.inf)
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :number]
    return best.sort(dim=1).values
