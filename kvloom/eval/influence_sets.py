"""Which rows of a prefix's cache are removed to see what predictions owe to them.

A set is written ``SCORE[:matched][:early|middle|late]``: the best rows by a score, as many as a share of the
prefix's tokens.

attention-last  mean attention of the prefix's last queries in the last layer, as in InfoKV's analysis (Eq. 4)
attention       the same, mean over all layers and heads, pooled over neighbours
attention-head  each layer and kv head has a set of its own by its own pooled attention, as real methods do
entropy         of the distribution that predicted the token (Eq. 2; restricted to the 256 likeliest)
sum             attention-last + softmax of the entropy over tokens (Eq. 5)
random          drawn, by document
low-entropy     the least entropy
recent          the latest
value-norm      the longest values, mean over layers and heads
keydiff         the keys least like the others, mean over layers and heads; sees no query
random-mass     drawn from the other rows so that all have about the attention of the entropy set: what
                attention alone explains of it
nothing         no row: every row is kept through the same code, the first noise floor
permuted        no row: the same rows in another order, the second noise floor

``matched``: sets share one histogram of positions: the rows that may be removed are cut into 16 bins by
position and each gives the same number. ``early``, ``middle``, ``late``: removed in one third of the layers
only. The first 4 rows and the last `window` are never removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kvloom.errors import MethodError
from kvloom.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvloom.cache_probe import CacheProbe

SINKS = 4
BINS = 16
KERNEL = 7
THIRDS = ("early", "middle", "late")
NOTHING = ("nothing", "permuted")
_NEIGHBOURS = 4  # in attention, among which random-mass draws

DEFAULT_SETS = (
    *("attention-last", "attention", "attention-head", "entropy", "sum", "random", "low-entropy", "recent"),
    *("value-norm", "keydiff", "random-mass"),
    *("attention-last:matched", "attention:matched", "attention-head:matched", "entropy:matched"),
    *("random:matched", "low-entropy:matched"),
    *(f"{score}:{third}" for score in ("attention", "entropy", "random") for third in THIRDS),
    *NOTHING,
)


@dataclass(frozen=True)
class RemovalSet:
    """A set as it was asked for; `label` names it."""

    label: str
    score: str
    is_matched: bool
    third: str | None
    share: float

    @classmethod
    def parse(cls, text: str, share: float) -> RemovalSet:
        """From the form above, with the share for where none is written. Raises ``MethodError``."""
        score, *parts = text.split(":")
        if score not in (*_SCORES, *NOTHING):
            raise MethodError(f"set {text!r}: unknown score {score!r}{did_you_mean(score, _SCORES)}")
        is_matched, third = False, None
        for part in parts:
            if part == "matched" and not is_matched:
                is_matched = True
            elif part in THIRDS and third is None:
                third = part
            else:
                raise MethodError(
                    f"set {text!r}: {part!r} is not one of matched, early, middle and late, each once"
                )
        if (parts and score in NOTHING) or (is_matched and score == "recent"):
            raise MethodError(f"set {text!r}: {score} takes no {parts[0]}")
        if score in NOTHING:
            share = 0.0
        elif not 0 < share < 1:
            raise MethodError(f"share of rows to remove lies above 0 and below 1, got {share}")
        return cls(text, score, is_matched, third, share)

    def layers(self, num_layers: int) -> range:
        """Where the rows are removed."""
        if self.third is None:
            return range(num_layers)
        place = THIRDS.index(self.third)
        return range(num_layers * place // 3, num_layers * (place + 1) // 3)


class Scores:
    """The scores of one document's prefix, each computed once."""

    def __init__(self, probe: CacheProbe, window: int, seed: int) -> None:
        self.probe = probe
        self.window = window
        self.seed = seed
        self.num_rows = probe.num_rows
        if self.num_rows <= SINKS + window:
            raise MethodError(
                f"a prefix of {self.num_rows} tokens has no row to remove: the first {SINKS} and the last "
                f"{window} are kept; take a longer one or a smaller window"
            )
        # (L, H, T): mean over the queries of the window and the query heads of a kv head
        self.seen = torch.stack([probe.window(n, window).mean((1, 2)) for n in range(probe.num_layers)])

    def of(self, name: str) -> Tensor:
        """(T,) float32, or (L, H, T): one per row, higher = removed first."""
        return _SCORES[name](self)

    @property
    def entropy(self) -> Tensor:
        """(T,) float32."""
        return self.probe.side("entropy", 0)

    @property
    def attention(self) -> Tensor:
        """(T,) float32: unpooled, mean over all layers and heads."""
        return self.seen.mean((0, 1))

    @property
    def value_norm(self) -> Tensor:
        """(T,) float32, mean over layers and heads."""
        norms = [self.probe.values(n).float().norm(dim=-1).mean(0) for n in range(self.probe.num_layers)]
        return torch.stack(norms).mean(0)

    @property
    def key_difference(self) -> Tensor:
        """(T,) float32: 1 - cosine to the mean direction of a head's keys, mean over layers and heads."""
        found = []
        for layer in range(self.probe.num_layers):
            keys = F.normalize(self.probe.keys(layer).float(), dim=-1)
            found.append(1 - F.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1).mean(0))
        return torch.stack(found).mean(0)

    def pooled(self) -> Tensor:
        """(L, H, T): the attention as real methods rank it, averaged over neighbours; the window has 0."""
        earlier = self.seen[..., : self.num_rows - self.window]
        smooth = F.avg_pool1d(earlier, KERNEL, stride=1, padding=KERNEL // 2)
        return F.pad(smooth, (0, self.window))

    def drawn(self) -> Tensor:
        """(T,): a random number for each row, another for each document."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.num_rows, generator=generator).to(self.seen.device)

    @property
    def candidates(self) -> Tensor:
        """(N,) int64, the rows that may be removed."""
        return torch.arange(SINKS, self.num_rows - self.window, device=self.seen.device)


_SCORES: dict[str, Callable[[Scores], Tensor]] = {
    "attention-last": lambda scores: scores.seen[-1].mean(0),
    "attention": lambda scores: scores.pooled().mean((0, 1)),
    "attention-head": Scores.pooled,
    "entropy": lambda scores: scores.entropy,
    "sum": lambda scores: scores.seen[-1].mean(0) + scores.entropy.softmax(-1),
    "random": Scores.drawn,
    "low-entropy": lambda scores: -scores.entropy,
    "recent": lambda scores: torch.arange(scores.num_rows, device=scores.seen.device).float(),
    "value-norm": lambda scores: scores.value_norm,
    "keydiff": lambda scores: scores.key_difference,
    "random-mass": lambda scores: scores.entropy,  # whose rows are then replaced
}


def pick(scores: Scores, wanted: RemovalSet) -> Tensor:
    """(m,) int64 ascending, or (L, H, m): the rows of the set; none for those that remove nothing."""
    if wanted.score in NOTHING:
        return scores.candidates[:0]
    candidates, number = scores.candidates, round(wanted.share * scores.num_rows)
    if not 0 < number < len(candidates):
        raise MethodError(
            f"set {wanted.label!r}: {number} of {scores.num_rows} rows are to be removed, of which "
            f"{len(candidates)} may be; choose another share"
        )
    bins = torch.tensor_split(candidates, BINS) if wanted.is_matched else (candidates,)
    quotas = shares(number, [len(rows) for rows in bins])
    score = scores.of(wanted.score)
    parts = [rows[best(score[..., rows], quota)] for rows, quota in zip(bins, quotas, strict=True)]
    if wanted.score == "random-mass":
        parts = alike(scores, bins, parts)
    return torch.cat(parts, -1).sort(-1).values


def best(score: Tensor, number: int) -> Tensor:
    """(..., number) int64: the places of the highest scores on the last dimension; ties to the earlier."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :number]


def shares(number: int, sizes: Sequence[int]) -> list[int]:
    """`number` in as equal whole parts as there are sizes, the same whatever the score."""
    parts = equal_parts(number, len(sizes))
    if any(part > size for part, size in zip(parts, sizes, strict=True)):
        raise MethodError(f"{number} rows do not fit into bins of {min(sizes)} rows; choose a smaller share")
    return parts


def equal_parts(number: int, num_parts: int) -> list[int]:
    """`number` in whole parts that differ by one at most."""
    return [number * (part + 1) // num_parts - number * part // num_parts for part in range(num_parts)]


def alike(scores: Scores, bins: Sequence[Tensor], chosen: Sequence[Tensor]) -> list[Tensor]:
    """For the rows chosen from each bin as many others of it, drawn so that all have their attention."""
    generator = torch.Generator().manual_seed(scores.seed + 1)
    attention = scores.attention.tolist()
    owed, found = 0.0, []  # owed: what those drawn so far fell short of, made up for by the next
    for rows, taken in zip(bins, chosen, strict=True):
        free = rows[~torch.isin(rows, taken)].tolist()
        if len(free) < len(taken):
            raise MethodError("random-mass needs as many other rows as entropy picks; choose a smaller share")
        drawn: list[int] = []
        for row in sorted(taken.tolist(), key=lambda row: -attention[row]):
            owed += attention[row]
            near = sorted(free, key=lambda other: abs(attention[other] - owed))[:_NEIGHBOURS]
            drawn.append(near[int(torch.randint(len(near), (), generator=generator))])
            owed -= attention[drawn[-1]]
            free.remove(drawn[-1])
        found.append(torch.tensor(drawn, device=rows.device))
    return found


def mass(scores: Scores, rows: Tensor, layers: range) -> float:
    """The attention that rows (m,) or (L, H, m) had in `layers`, where they are removed; mean over all layers
    and heads.
    """
    if rows.numel() == 0:
        return 0.0
    removed = scores.seen.gather(-1, rows.expand(*scores.seen.shape[:2], -1)).sum(-1).mean(1)  # (L,)
    return float(removed[layers.start : layers.stop].sum()) / len(removed)


CELLS = (
    *("low attention, low entropy", "low attention, high entropy"),
    *("high attention, low entropy", "high attention, high entropy"),
)


def stratified(scores: Scores, number: int) -> dict[int, str]:
    """Single rows with their cell of CELLS, equally many of each, spread over positions.

    High is above the median of the rows that may be removed.
    """
    candidates = scores.candidates
    attention, entropy = scores.attention[candidates], scores.entropy[candidates]
    is_seen, is_unsure = attention > attention.median(), entropy > entropy.median()
    members = (~is_seen & ~is_unsure, ~is_seen & is_unsure, is_seen & ~is_unsure, is_seen & is_unsure)
    generator = torch.Generator().manual_seed(scores.seed + 2)
    found: dict[int, str] = {}
    for cell, of_cell, wanted in zip(CELLS, members, equal_parts(number, 4), strict=True):
        rows = candidates[of_cell.nonzero()[:, 0]]
        for stratum in torch.tensor_split(rows, wanted) if wanted else ():
            drawn = stratum[torch.randperm(len(stratum), generator=generator)[:1].to(stratum.device)]
            found |= dict.fromkeys(drawn.tolist(), cell)
    return dict(sorted(found.items()))
