"""Probe: all that a scoring method may look at, lazily, without side effects; it counts what it cost.

Methods never run a forward themselves. The question is run over the spliced cache, layer by layer, up to the
last layer asked for; its attention is reduced while it is computed, and the cache is left as it was. Under
another geometry than the global one the question is run over a second cache, spliced anew from the stored
chunks at that geometry's positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from kvloom.attention import Recorded
from kvloom.errors import MethodError
from kvloom.layout import LAYOUTS
from kvloom.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder


class _Listener(Protocol):
    """Hears one layer's attention in blocks of question tokens, and keeps a reduction of it."""

    def add(self, weights: Tensor) -> None:  # (H * G, q, T) float32
        ...

    def result(self) -> Tensor: ...


class _Power:
    """The L-`power` norm over question tokens of the mean over heads; (T,) float32."""

    def __init__(self, power: int) -> None:
        self.power = power
        self.total: Tensor | float = 0.0

    def add(self, weights: Tensor) -> None:
        self.total = self.total + weights.mean(0).pow(self.power).sum(0)

    def result(self) -> Tensor:
        assert isinstance(self.total, Tensor), "the scoring pass must visit every layer asked for"
        return self.total.pow(1 / self.power)


class _Entropy(_Power):
    """The sum over question tokens of -p log p, p the mean over heads; (T,) float32."""

    def __init__(self) -> None:
        super().__init__(1)

    def add(self, weights: Tensor) -> None:
        mean = weights.mean(0)
        self.total = self.total - torch.xlogy(mean, mean).sum(0)


class _ValueWeighted(_Power):
    """The sum over heads and question tokens of attention times the norm of the value attended to; (T,)
    float32.
    """

    def __init__(self, cache: SplicedCache, layer: int) -> None:
        super().__init__(1)
        self.norms = cache.by_row(layer, cache.values(layer).float().norm(dim=-1))  # (H, T)

    def add(self, weights: Tensor) -> None:
        per_head = weights.sum(1).unflatten(0, (len(self.norms), -1))  # (H, G, T)
        self.total = self.total + (per_head.sum(1) * self.norms).sum(0)


class _Maps:
    """The attention itself, (H, G, Q, T) float32."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.blocks: list[Tensor] = []

    def add(self, weights: Tensor) -> None:
        self.blocks.append(weights)

    def result(self) -> Tensor:
        return torch.cat(self.blocks, 1).unflatten(0, (self.num_heads, -1))


REDUCTIONS: dict[str, Callable[[SplicedCache, int], _Listener]] = {
    "norm": lambda cache, layer: _Power(2),
    "mass": lambda cache, layer: _Power(1),
    "entropy": lambda cache, layer: _Entropy(),
    "values": _ValueWeighted,
}
"""How a layer's attention becomes a score per context token, given the cache and the layer.

"norm" is what the InfoFlow authors' code runs (head mean, then L2 over question tokens), "mass" the paper's
Eq. 7 (a column sum), "entropy" and "values" the authors' other scores.
"""

QUERIES = ("question", "suffix")


class Probe:
    """The view of one spliced cache and one question.

    `question_ids` (Q,) is the whole part of the prompt after the chunks, `question_span` the range of the raw
    question's tokens in it. `geometry` names the positions of the cache, `groups` are lists of chunks that
    belong together, in order. `respliced(geometry)` gives another cache of the same chunks. `cost` is in
    token-layers: rows computed times layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: SplicedCache,
        question_ids: Tensor,
        question_span: range,
        *,
        geometry: str = "global",
        groups: Sequence[Sequence[int]] | None = None,
        respliced: Callable[[str], SplicedCache] | None = None,
    ) -> None:
        self._decoder = decoder
        self._spliced = cache
        self._caches = {geometry: cache}
        self._respliced = respliced
        self._seen: dict[object, dict[int, Tensor]] = {}
        self.question_ids = question_ids
        self.question_span = question_span
        self.token_ids = cache.token_ids
        self.positions = cache.positions
        self.spans = list(cache.spans)
        self.groups = [[index] for index in range(len(self.spans))] if groups is None else groups
        # (T,) bool: rows that recomputing would not change: their KV is already that of a full prefill, or a
        # compressed chunk has left nothing of them.
        self.exact = cache.exact | ~cache.is_held
        self.num_rows = cache.num_rows
        self.num_layers = decoder.num_layers
        self.cost = 0

    def keys(self, layer: int) -> Tensor:
        """(H, T, D), rotated to the rows' positions, not to be written to."""
        return self._spliced.keys(layer)

    def values(self, layer: int) -> Tensor:
        """(H, T, D), not to be written to."""
        return self._spliced.values(layer)

    def attention(
        self, geometry: str = "global", *, layers: Sequence[int] | None = None, query: str = "question"
    ) -> dict[int, Tensor]:
        """{layer: (H, G, Q, T)} float32: how the question attends to the context rows, of all layers or some.

        The softmax runs over context and question, so a row sums to 1 less the mass on the question's own
        tokens. `query` is "question" (the raw question's tokens) or "suffix" (all tokens after the chunks).
        """
        return self._observe(["maps"], geometry, layers, query)["maps"]

    def reduced(
        self,
        *reductions: str,
        geometry: str = "global",
        layers: Sequence[int] | None = None,
        query: str = "question",
    ) -> Tensor:
        """(R, L, T) float32: the question's attention to each context row, reduced as `REDUCTIONS` says.

        One plane per reduction and layer asked for, all from one pass, reduced block by block while it is
        computed: no map of a layer is held whole.
        """
        for reduction in reductions:
            if reduction not in REDUCTIONS:
                raise MethodError(f"unknown reduction {reduction!r}{did_you_mean(reduction, REDUCTIONS)}")
        seen = self._observe(list(reductions), geometry, layers, query)
        return torch.stack([torch.stack(list(seen[reduction].values())) for reduction in reductions])

    def fresh(self, num_layers: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values, (H, T, D) each, of the first `num_layers` layers of a full prefill of the
        context.
        """
        key = ("fresh", num_layers)
        if key not in self._seen:
            cache = self._decoder.new_cache(self.num_rows)
            self._decoder.fill(
                self.token_ids, self.positions, cache, num_new=self.num_rows, num_layers=num_layers
            )
            self.cost += self.num_rows * num_layers
            self._seen[key] = {
                layer: torch.stack([cache.keys(layer), cache.values(layer)]) for layer in range(num_layers)
            }
        return [(pair[0], pair[1]) for pair in self._seen[key].values()]

    def deviation(self, layer: int, of: Literal["values", "keys"] = "values") -> Tensor:
        """(T,) float32: the squared difference between the stored values, or keys, of a layer and those of a
        full prefill, summed over heads and channels. Costs the layers up to this one, for every row.
        """
        fresh = self.fresh(layer + 1)[layer][of == "values"]
        stored = self.values(layer) if of == "values" else self.keys(layer)
        if len(stored[0]) < self.num_rows:  # what was dropped does not count
            rows = self._spliced.layers[layer].rows
            assert rows is not None, "a layer that holds fewer rows knows which"
            fresh = fresh.gather(1, rows[..., None].expand(-1, -1, fresh.shape[2]))
            squares = (fresh.float() - stored.float()).square().sum(2)
            return self._spliced.by_row(layer, squares).sum(0)
        return (fresh.float() - stored.float()).square().sum((0, 2))

    # --- the scoring pass

    def _observe(
        self, kinds: list[str], geometry: str, layers: Sequence[int] | None, query: str
    ) -> dict[str, dict[int, Tensor]]:
        """{kind: {layer: result}}; what was observed before is not run again."""
        wanted = tuple(range(self.num_layers)) if layers is None else tuple(layers)
        if not wanted or min(wanted) < 0 or max(wanted) >= self.num_layers:
            raise MethodError(f"layers to score must lie in 0..{self.num_layers - 1}, got {list(wanted)}")
        if query not in QUERIES:
            raise MethodError(f"unknown query {query!r}; there are: {', '.join(QUERIES)}")
        keys = {kind: (kind, geometry, wanted, query) for kind in kinds}
        missing = [kind for kind, key in keys.items() if key not in self._seen]
        if missing:
            cache = self._cache_in(geometry)
            listeners = {layer: [self._listener(kind, cache, layer) for kind in missing] for layer in wanted}
            self._run_question(cache, listeners, query)
            for place, kind in enumerate(missing):
                self._seen[keys[kind]] = {layer: listeners[layer][place].result() for layer in wanted}
        return {kind: self._seen[key] for kind, key in keys.items()}

    def _cache_in(self, geometry: str) -> SplicedCache:
        if geometry not in LAYOUTS:
            raise MethodError(f"unknown geometry {geometry!r}{did_you_mean(geometry, LAYOUTS)}")
        if geometry not in self._caches:
            if self._respliced is None:
                raise MethodError(f"this probe has the global geometry only, not {geometry!r}")
            self._caches[geometry] = self._respliced(geometry)
        return self._caches[geometry]

    def _listener(self, kind: str, cache: SplicedCache, layer: int) -> _Listener:
        if kind == "maps":
            return _Maps(self._decoder.kv_shapes[layer].num_heads)
        return REDUCTIONS[kind](cache, layer)

    def _run_question(self, cache: SplicedCache, listeners: dict[int, list[_Listener]], query: str) -> None:
        """Runs the question up to the last scored token and layer; hears only the scored tokens' weights."""
        scored = self.question_span if query == "question" else range(len(self.question_ids))
        num_layers = max(listeners) + 1
        token_ids = self.question_ids[: scored.stop]
        positions = cache.next_position + torch.arange(len(token_ids))
        heard = dict.fromkeys(listeners, 0)
        held = [layer.length for layer in cache.layers]

        def listen(layer: int, weights: Tensor) -> None:
            first = heard[layer]
            heard[layer] += weights.shape[1]
            weights = weights[:, max(0, scored.start - first) :, : held[layer]]
            if weights.shape[1]:
                weights = cache.by_row(layer, weights)[..., : self.num_rows]
                for listener in listeners[layer]:
                    listener.add(weights)

        with cache.untouched():
            self._decoder.fill(
                token_ids,
                positions,
                cache,
                num_new=len(token_ids),
                num_layers=num_layers,
                plan=lambda by_position: Recorded(by_position, frozenset(listeners), listen),
            )
        self.cost += len(token_ids) * num_layers
