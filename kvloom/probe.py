"""Probe: all that a scoring method may look at, lazily, without side effects; it counts what it cost.

Methods never run a forward themselves. The question is run over the spliced cache under the global positions,
layer by layer, up to the last layer asked for; its attention is reduced while it is computed, and the cache
is left as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvloom.attention import Recorded
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder


class _Sum:
    """Running sum over question tokens of `power(head mean of the attention)`; (T,) float32."""

    def __init__(self, power: int, num_context: int) -> None:
        self.power = power
        self.num_context = num_context
        self.total: Tensor | None = None

    def add(self, weights: Tensor) -> None:  # (H * G, q, T + Q)
        part = weights[..., : self.num_context].mean(0).pow(self.power).sum(0)
        self.total = part if self.total is None else self.total + part

    def result(self) -> Tensor:
        assert self.total is not None, "the scoring pass must visit every layer asked for"
        return self.total.pow(1 / self.power)


class _Maps:
    """The attention itself, (H, G, Q, T) float32."""

    def __init__(self, num_heads: int, num_context: int) -> None:
        self.num_heads = num_heads
        self.num_context = num_context
        self.blocks: list[Tensor] = []

    def add(self, weights: Tensor) -> None:
        self.blocks.append(weights[..., : self.num_context])

    def result(self) -> Tensor:
        return torch.cat(self.blocks, 1).unflatten(0, (self.num_heads, -1))


REDUCTIONS: dict[str, int] = {"mass": 1, "norm": 2}
"""How a layer's attention (H, G, Q, T) becomes a score per context token: the mean over heads, then this
L-norm over question tokens. "mass" is the paper's Eq. 7 (a column sum), "norm" is what the authors' code
runs."""


class Probe:
    """The view of one spliced cache and one question.

    `question_ids` (Q,) is the whole part of the prompt after the chunks, `question_span` the range of the raw
    question's tokens in it. `cost` is in token-layers: rows computed times layers.
    """

    def __init__(
        self, decoder: Decoder, cache: SplicedCache, question_ids: Tensor, question_span: range
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self.question_ids = question_ids
        self.question_span = question_span
        self.token_ids = cache.token_ids
        self.positions = cache.positions
        self.spans = list(cache.spans)
        self.exact = cache.exact  # (T,) bool: rows whose KV is already that of a full prefill
        self.num_rows = cache.num_rows
        self.num_layers = decoder.num_layers
        self.cost = 0
        self._seen: dict[object, dict[int, Tensor]] = {}

    def keys(self, layer: int) -> Tensor:
        """(H, T, D), rotated to the rows' positions, not to be written to."""
        return self._cache.keys(layer)

    def values(self, layer: int) -> Tensor:
        """(H, T, D), not to be written to."""
        return self._cache.values(layer)

    def attention(
        self, geometry: str = "global", *, layers: Sequence[int] | None = None, query: str = "question"
    ) -> dict[int, Tensor]:
        """{layer: (H, G, Q, T)} float32: how the question attends to the context rows, of all layers or some.

        The softmax runs over context and question, so a row sums to 1 less the mass on the question's own
        tokens. `query` is "question" (the raw question's tokens) or "suffix" (all tokens after the chunks).
        """
        if geometry != "global":
            raise MethodError(f"unknown geometry {geometry!r}; there are: global")
        heads = [shape.num_heads for shape in self._decoder.kv_shapes]
        return self._observe("maps", layers, query, lambda layer: _Maps(heads[layer], self.num_rows))

    def reduced(
        self, reduction: str, *, layers: Sequence[int] | None = None, query: str = "question"
    ) -> dict[int, Tensor]:
        """{layer: (T,)} float32: the question's attention to each context row, reduced as `REDUCTIONS` says.

        Reduced block by block while it is computed: no map of a layer is held whole.
        """
        if reduction not in REDUCTIONS:
            raise MethodError(f"unknown reduction {reduction!r}; there are: {', '.join(REDUCTIONS)}")
        return self._observe(reduction, layers, query, lambda _: _Sum(REDUCTIONS[reduction], self.num_rows))

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
            self._seen[key] = dict(
                enumerate(torch.stack([cache.keys(i), cache.values(i)]) for i in range(num_layers))
            )
        return [(pair[0], pair[1]) for pair in self._seen[key].values()]

    def _observe(
        self, kind: str, layers: Sequence[int] | None, query: str, listener: Callable[[int], _Sum | _Maps]
    ) -> dict[int, Tensor]:
        wanted = tuple(range(self.num_layers)) if layers is None else tuple(layers)
        if not wanted or min(wanted) < 0 or max(wanted) >= self.num_layers:
            raise MethodError(f"layers to score must lie in 0..{self.num_layers - 1}, got {list(wanted)}")
        if query not in ("question", "suffix"):
            raise MethodError(f"unknown query {query!r}; there are: question, suffix")
        key = kind, wanted, query
        if key not in self._seen:
            scored = self.question_span if query == "question" else range(len(self.question_ids))
            listeners = {layer: listener(layer) for layer in wanted}
            self._run_question(listeners, scored)
            self._seen[key] = {layer: listeners[layer].result() for layer in wanted}
        return self._seen[key]

    def _run_question(self, listeners: dict[int, _Sum | _Maps], scored: range) -> None:
        """Runs the question up to the last scored token and layer; hears only the scored tokens' weights."""
        num_layers = max(listeners) + 1
        token_ids = self.question_ids[: scored.stop]
        positions = self._cache.next_position + torch.arange(len(token_ids))
        heard = dict.fromkeys(listeners, 0)

        def listen(layer: int, weights: Tensor) -> None:
            first = heard[layer]
            heard[layer] += weights.shape[1]
            weights = weights[:, max(0, scored.start - first) :]
            if weights.shape[1]:
                listeners[layer].add(weights)

        with self._cache.untouched():
            self._decoder.fill(
                token_ids,
                positions,
                self._cache,
                num_new=len(token_ids),
                num_layers=num_layers,
                plan=lambda by_position: Recorded(by_position, frozenset(listeners), listen),
            )
        self.cost += len(token_ids) * num_layers
