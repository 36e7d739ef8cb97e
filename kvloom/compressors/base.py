"""Compressor: a score for each place of each layer; `compress` keeps the best.

`keep` is the share of tokens KEPT, 1 for all (some libraries call the share removed a compression ratio). One
method serves a prompt and, where `phases` says so, an answer while it grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvloom.errors import MethodError
from kvloom.observe import Records
from kvloom.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kvloom.cache_probe import CacheProbe

compressors: Registry[Compressor] = Registry("compressor", "kvloom.compressors")


@dataclass(frozen=True, kw_only=True)
class Compressor(ABC):
    """Base of all methods that drop rows. Raises ``MethodError`` for a `keep` outside 0..1, 0 excluded."""

    keep: float = 0.4  # share of the tokens that is kept

    name: ClassVar[str]
    phases: ClassVar[frozenset[str]] = frozenset({"prefill"})

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise MethodError(
                f"{self.name}: keep is the share of tokens to keep, above 0 and at most 1, got {self.keep}"
            )

    @property
    def records(self) -> Records:
        """What must be recorded while the cache is filled."""
        return Records()

    @abstractmethod
    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        """(H, T) float32, or (1, T) for one set for all heads: one per place of the layer, higher = keep."""

    def budgets(self, probe: CacheProbe, total: int) -> list[int]:
        """Places to keep in each layer, when `total` is what equal layers would keep each."""
        return [total] * probe.num_layers

    def protected(self, probe: CacheProbe) -> Tensor:
        """(N,) bool, one per row of the cache: rows that stay whatever their score."""
        return torch.zeros(probe.num_rows, dtype=torch.bool)

    def check_at_least(self, minimum: int, **options: int) -> None:
        """Raises ``MethodError`` for an option that is not a whole number of at least `minimum`."""
        for name, value in options.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise MethodError(
                    f"{self.name}: {name} is a whole number of at least {minimum}, got {value!r}"
                )

    def check_among(self, **options: tuple[Any, tuple[str, ...]]) -> None:
        """Raises ``MethodError`` for an option that is none of the values allowed."""
        for name, (value, allowed) in options.items():
            if value not in allowed:
                raise MethodError(f"{self.name}: {name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Growing(Compressor):
    """Base of all methods that compress answers while they grow.

    The defaults are those of the papers; where answers are shorter than `every`, nothing is dropped.
    """

    every: int = 1024  # while decoding: generated tokens between two compressions
    recent: int = 32  # while decoding: generated tokens at the end that always stay

    phases: ClassVar[frozenset[str]] = frozenset({"decode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, every=self.every, recent=self.recent)


def last_rows(probe: CacheProbe, size: int) -> Tensor:
    """(N,) bool: the last `size` rows."""
    return torch.arange(probe.num_rows) >= probe.num_rows - size


def rounded(shares: list[float], total: int) -> list[int]:
    """The shares in whole numbers of sum `total`, as near to them as can be; ties go to the earlier one."""
    whole = [int(share) for share in shares]
    by_loss = sorted(range(len(shares)), key=lambda n: (whole[n] - shares[n], n))
    for index in by_loss[: total - sum(whole)]:
        whole[index] += 1
    return whole


def in_proportion(total: int, weights: list[float], *, most: int) -> list[int]:
    """Whole numbers of sum `total` in proportion to weights; what one would have beyond `most` goes to the
    others.
    """
    full: set[int] = set()
    while True:
        left, others = total - most * len(full), [n for n in range(len(weights)) if n not in full]
        if not any(weights[n] for n in others):
            weights = [1.0] * len(weights)
        rest = sum(weights[n] for n in others)
        shares = [float(most) if n in full else left * w / rest for n, w in enumerate(weights)]
        above = {n for n, share in enumerate(shares) if share > most}
        if not above:
            return rounded(shares, total)
        full |= above


def as_compressor(
    compressor: Compressor | str, options: Mapping[str, Any] | None = None, *, phase: str = "prefill"
) -> Compressor:
    """The instance given, or one of the registered name with options as data.

    Raises ``MethodError`` for others, and for one that is not for this phase, "prefill" or "decode".
    """
    if isinstance(compressor, str):
        built = compressors.build(compressor, options)
    elif isinstance(compressor, Compressor):
        if options:
            raise TypeError("options go with a compressor's name; an instance has its own")
        built = compressor
    else:
        raise MethodError(
            f"a compressor is a name or an instance such as InfoKV(keep=0.4), got {compressor!r}"
        )
    if phase not in built.phases:
        when = {
            "prefill": "compresses answers while they grow, not prompts",
            "decode": "compresses prompts only",
        }
        raise MethodError(f"{built.name} {when[phase]}")
    if phase == "prefill":
        for option in ("every", "recent"):
            if option in (options or {}):
                raise MethodError(f"{built.name}: {option} is for answers while they grow, not for prompts")
    return built
