"""Observer: forwards whose by-products a compressor asked for are kept with the rows.

Two signals are frozen when a row is made, and travel with it as the cache's `side` data: "entropy", of the
distribution that predicted the token, and "drift", how far its hidden state after each layer still is from
the last one (InfoKV, arXiv 2606.26875, Eqs. 2 and 6). What else is kept, the last queries, the attention
received, the moments of the queries, belongs to the forwards and not to rows.

A prompt is run in blocks, so that what is held on the way is bounded by the block; the result is that of the
whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.attention import ByPosition, Plan, Recorded, Watched
from kvloom.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvloom.attention import Heads
    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder

TOKENS_PER_BLOCK = 512
"""Tokens whose hidden states after every layer are held at once."""

ROWS_PER_HEAD_BLOCK = 128
"""Rows whose logits over the whole vocabulary are held at once."""

NUM_SINKS = 4
"""First tokens, whose queries are left out of the moments: they are like no later query."""


@dataclass(frozen=True, kw_only=True)
class EntropyKind:
    """Over which tokens the entropy is taken: the `k` likeliest, their probabilities renormalised or not."""

    k: int = 256
    renormalize: bool = True


@dataclass(frozen=True, kw_only=True)
class Records:
    """What is to be kept of forwards; ``a | b`` keeps what either asks for."""

    entropy: EntropyKind | None = None
    drift: str | None = None  # "residual": both states on the residual stream; "normed": the last one normed
    window: int = 0  # number of last queries
    received: bool = False  # attention that each key received, summed over all queries
    moments: bool = False  # mean and covariance of the queries before RoPE

    def __or__(self, other: Records) -> Records:
        for name in ("entropy", "drift"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise MethodError(
                    f"the compressors of prompt and answer ask for different {name} ({mine} and {theirs}), "
                    "and a row keeps one; give both the same options"
                )
        return Records(
            entropy=self.entropy or other.entropy,
            drift=self.drift or other.drift,
            window=max(self.window, other.window),
            received=self.received or other.received,
            moments=self.moments or other.moments,
        )


def restricted_entropy(logits: Tensor, kind: EntropyKind) -> Tensor:
    """(S,) float32, nats: the entropy of each row of logits (S, V) over its k likeliest tokens (SeLaR, arXiv
    2604.08299); k is V where that is less.
    """
    logits = logits.float()
    top = logits.topk(min(kind.k, logits.shape[-1]), dim=-1).values
    shares = top.softmax(-1) if kind.renormalize else (top - logits.logsumexp(-1, keepdim=True)).exp()
    return torch.special.entr(shares).sum(-1)


def drift(states: Tensor, last: Tensor) -> Tensor:
    """(L, S) float32: 1 - cos of hidden states (L, S, d) and the last one (S, d), 0..2."""
    return 1 - F.cosine_similarity(states.float(), last.float()[None], dim=-1)


class Observer:
    """Runs tokens of one sequence through the decoder and keeps `records` of them."""

    def __init__(self, decoder: Decoder, cache: SplicedCache, records: Records) -> None:
        self.decoder = decoder
        self.cache = cache
        self.records = records
        self.queries: dict[int, Tensor] = {}  # layer -> (H * G, W, D), rotated, of the last W rows
        self.received: dict[int, Tensor] = {}  # layer -> (H * G, T) float32, one per row of the cache
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> sums of queries and of their products
        self.num_summed = 0
        self.next_entropy: Tensor | None = None  # () of the distribution that predicts the next token
        self.num_rows = 0  # of the cache, when last looked at
        self.is_whole = True  # no other forward appended rows

    def run(self, token_ids: Tensor) -> Tensor:
        """(V,) float32 logits after the last of token_ids (T,), which go on after the cache and are appended
        to it.
        """
        states, logits = self._run(token_ids)
        return self.decoder.head(states[-1:])[-1] if logits is None else logits

    def follow(self, token_ids: Tensor) -> Tensor:
        """(S, V) float32 logits after each of token_ids (S,); all else is as after `run`."""
        states, _ = self._run(token_ids, is_whole=True)
        return torch.cat([self.decoder.head(block) for block in states.split(ROWS_PER_HEAD_BLOCK)])

    def _run(self, token_ids: Tensor, *, is_whole: bool = False) -> tuple[Tensor, Tensor | None]:
        """Final states (S, d), of the last block or the whole, and the last logits (V,), where they had to be
        computed.
        """
        if len(token_ids) == 0:
            raise ValueError("there must be at least one token to run")
        is_first, entropies = self.cache.num_rows == 0, []
        if self.num_rows != self.cache.num_rows:
            self._miss()
        states, kept, logits = torch.empty(0), [], None
        for block in token_ids.split(TOKENS_PER_BLOCK):
            states = self._forward(block)
            if is_whole:
                kept.append(states)
            if self.records.entropy is not None:
                logits, found = self._entropies(states)
                entropies.append(found)
        states = torch.cat(kept) if is_whole else states
        self.num_rows = self.cache.num_rows
        if not entropies:
            return states, None
        row_entropies = torch.cat(entropies)
        if is_first:  # nothing predicted the first token; the mean of the others of its prompt stands for it
            rest = row_entropies[1:]
            row_entropies[0] = rest.mean() if len(rest) else 0.0
        self.cache.record("entropy", row_entropies)
        return states, logits

    def checkpoint(self) -> Callable[[], None]:
        """A function that takes back what was recorded since."""
        held = {name: getattr(self, name) for name in ("next_entropy", "num_rows", "num_summed", "is_whole")}
        held |= {name: dict(getattr(self, name)) for name in ("queries", "received", "sums")}
        return lambda: vars(self).update(held)

    def keep(self, layer: int, places: Tensor) -> None:
        """What is held for each key of a layer, after the cache kept only `places` (H, S) of it."""
        if layer in self.received:
            held = self.received[layer].unflatten(0, (len(places), -1))  # (H, G, T)
            kept = held.gather(2, places[:, None].expand(-1, held.shape[1], -1))
            self.received[layer] = kept.flatten(0, 1)

    def require(self, records: Records, who: str) -> None:
        """Raises ``MethodError`` unless all that is asked for has been kept from the beginning."""
        if self.records | records != self.records:
            raise MethodError(
                f"{who} needs what was not recorded when this conversation began; name it as a compressor "
                "from the first prompt on"
            )

    def moments(self, layer: int) -> tuple[Tensor, Tensor]:
        """Mean (H * G, D) and covariance (H * G, D, D), float32, of the queries before RoPE."""
        total, products = self.sums[layer]
        mean = total / self.num_summed
        return mean, products / self.num_summed - mean[:, :, None] * mean[:, None, :]

    def _miss(self) -> None:
        """Another forward appended rows: neither their queries nor what predicts the next token are known."""
        self.is_whole = False
        self.queries = {}
        self.next_entropy = None

    # --- one block

    def _forward(self, block: Tensor) -> Tensor:
        """(S, d) final states of a block."""
        positions = self.cache.next_position + torch.arange(len(block))
        heard: list[Tensor] = []
        listen: Callable[[int, Tensor], None] | None = None
        if self.records.drift is not None:
            listen = lambda _, states: heard.append(states)  # noqa: E731
        rotations = None
        if self.records.moments:
            rotations = self.decoder.rotations(-positions)
        states = self.decoder.observe(
            block, positions, self.cache, listen, lambda plan: self._plan(plan, rotations)
        )
        if rotations is not None:
            self.num_summed += int((positions >= NUM_SINKS).sum())
        if heard:
            last = heard[-1] if self.records.drift == "residual" else states
            columns = drift(torch.stack(heard), last)
            if self.records.drift == "normed":
                columns[-1] = 0  # the last layer's state is the last state, however it is written down
            self.cache.record("drift", columns)
        return states

    def _plan(self, plan: ByPosition, rotations: Tensor | None) -> Plan:
        watched: Plan = plan
        if self.records.received:
            layers = frozenset(range(self.decoder.num_layers))
            watched = Recorded(plan, layers, self._receive)
        if self.records.window or rotations is not None:
            after_sinks = plan.query_positions >= NUM_SINKS

            def watch(layer: int, query: Tensor, _: Heads) -> None:
                if self.records.window:
                    self._watch(layer, query)
                if rotations is not None:
                    self._sum(layer, query, rotations, after_sinks)

            watched = Watched(watched, watch)
        return watched

    def _watch(self, layer: int, query: Tensor) -> None:
        held = self.queries.get(layer, query[:, :0])
        self.queries[layer] = torch.cat([held, query], 1)[:, -self.records.window :].clone()

    def _sum(self, layer: int, query: Tensor, rotations: Tensor, wanted: Tensor) -> None:
        unrotated = torch.einsum("hsd,sde->hse", query.float(), rotations)[:, wanted]
        total, products = self.sums.get(layer, (0.0, 0.0))
        self.sums[layer] = (
            total + unrotated.sum(1),
            products + torch.einsum("hsd,hse->hde", unrotated, unrotated),
        )

    def _receive(self, layer: int, weights: Tensor) -> None:
        """Adds the weights (H * G, s, T) of some rows to what each key received."""
        num_heads, _, num_keys = weights.shape
        held = self.received.get(layer, weights.new_zeros((num_heads, 0)))
        grown = F.pad(held, (0, num_keys - held.shape[1]))
        self.received[layer] = grown + weights.sum(1)

    def _entropies(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The last row's logits (V,), and for each row the entropy (S,) of what predicted it."""
        assert self.records.entropy is not None
        own, logits = [], states
        for block in states.split(ROWS_PER_HEAD_BLOCK):
            logits = self.decoder.head(block)
            own.append(restricted_entropy(logits, self.records.entropy))
        after = torch.cat(own)
        before = after.new_tensor([math.nan]) if self.next_entropy is None else self.next_entropy[None]
        self.next_entropy = after[-1]
        return logits[-1], torch.cat([before, after[:-1]])
