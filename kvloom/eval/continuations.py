"""Continuations: how far the predictions over one cache are from those over another, token by token.

The tokens after a prefix are given (teacher-forced) and run in chunks. The first prediction, made by the
prefix's own last token before anything was dropped, is the same for all and left out: position t is the
prediction made by continuation token t.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvloom.eval.metrics import kl_per_token
from kvloom.eval.texts import CHUNK, NEAR

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache import SplicedCache
    from kvloom.hf import Decoder
    from kvloom.observe import Observer


@dataclass(frozen=True)
class Distances:
    """Means over chunks of CHUNK tokens, one number a chunk, in order of distance from the prefix."""

    kl: list[float]  # nats, KL(full || this)
    dnll: list[float]  # nats, negative log-likelihood of the next token less the full cache's
    agreement: list[float]  # share of tokens whose likeliest successor is the full cache's


@dataclass(frozen=True, eq=False)
class Reference:
    """The continuation of a document over its full cache."""

    ids: Tensor  # (C,) the tokens that are run
    targets: Tensor  # (C,) what follows each
    logits: Tensor  # (C, V) float32
    log_sums: Tensor  # (C,) float64, of their exponentials
    nll: list[float]  # mean by chunk

    @property
    def num_chunks(self) -> int:
        return len(self.ids) // CHUNK


def fork(decoder: Decoder, cache: SplicedCache) -> SplicedCache:
    """A cache of its own with all that `cache` holds now."""
    twin = decoder.new_cache(0)
    for mine, theirs in zip(twin.layers, cache.layers, strict=True):
        mine.fill(theirs.keys[0], theirs.values[0], theirs.rows)
    twin.token_ids, twin.positions, twin.exact = cache.token_ids, cache.positions, cache.exact
    twin.spans, twin.side, twin.next_position = list(cache.spans), dict(cache.side), cache.next_position
    return twin


def fork_observer(observer: Observer, cache: SplicedCache) -> Observer:
    """An observer of `cache`, a fork of the first one's, that knows what the first one recorded."""
    twin = copy.copy(observer)
    twin.cache = cache
    for name, held in vars(observer).items():
        if isinstance(held, dict):  # by layer; what it holds is replaced, never written to
            setattr(twin, name, dict(held))
    return twin


def follow(decoder: Decoder, cache: SplicedCache, following: Tensor) -> Reference:
    """The reference: `following` (C + 1,) run over the cache, whose rows it is appended to."""
    ids = following[:-1]
    logits = torch.cat([decoder.follow(chunk, cache) for chunk in ids.split(CHUNK)])
    targets = following[1:].to(logits.device)
    log_sums = torch.cat([part.double().logsumexp(-1) for part in logits.split(CHUNK)])
    nll = log_sums - logits.gather(-1, targets[:, None])[:, 0]
    return Reference(ids, targets, logits, log_sums, [float(part.mean()) for part in nll.split(CHUNK)])


def distances(decoder: Decoder, cache: SplicedCache, reference: Reference) -> Distances:
    """How far predictions over `cache`, to which the continuation is appended, are from the reference."""
    found = Distances([], [], [])
    for chunk in range(reference.num_chunks):
        add_chunk(found, decoder, cache, reference, chunk)
    return found


def add_chunk(
    found: Distances, decoder: Decoder, cache: SplicedCache, reference: Reference, chunk: int
) -> None:
    """Runs one chunk of the continuation over the cache, and adds its numbers to what was found."""
    rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
    logits, full = decoder.follow(reference.ids[rows], cache), reference.logits[rows]
    kl, nll = kl_and_nll(full, reference.log_sums[rows], logits, reference.targets[rows])
    found.kl.append(float(kl.mean()))
    found.dnll.append(float(nll.mean()) - reference.nll[chunk])
    found.agreement.append(float((full.argmax(-1) == logits.argmax(-1)).double().mean()))


def kl_and_nll(full: Tensor, log_sums: Tensor, other: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """KL(full || other) and the negative log-likelihood of targets under `other`, (S,) float64 each, from
    logits (S, V) and the logarithms of the sums of the full one's exponentials.

    What `kvloom.eval.metrics` computes, in half the time: nothing is normalised that need not be.
    """
    wide, rest = full.double(), other.double()
    other_sums = rest.logsumexp(-1)
    shares = (wide - log_sums[:, None]).exp()
    kl = (shares * (wide - rest)).sum(-1) - log_sums + other_sums
    if not kl.isfinite().all():  # a token is excluded: 0 times infinity
        kl = kl_per_token(full, other)
    return kl.clamp_min(0), other_sums - rest.gather(-1, targets[:, None])[:, 0]


def near(by_chunk: list[float]) -> float:
    """The mean over the first NEAR tokens."""
    first = by_chunk[: NEAR // CHUNK]
    return sum(first) / len(first)


def far(by_chunk: list[float]) -> float:
    """The mean over the second half of the continuation."""
    second = by_chunk[len(by_chunk) // 2 :]
    return sum(second) / len(second)
