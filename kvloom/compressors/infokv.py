"""InfoKV (arXiv 2606.26875): attention fused with how unsure the model was and how far a layer is from the
end.

For token i and layer l, with H the entropy (nats, over the k likeliest tokens) of the distribution that
predicted it and D = 1 - cos(its hidden state after l, after the last layer):

    E = (D + tau) H                                          Eq. 7
    S = alpha A + (1 - alpha) softmax over tokens of E       Eq. 8

A is the mean attention of the last queries, pooled over neighbours. No code of the authors exists; what the
text leaves open is an option, and the default is the reading that fits the rest of the paper best:

    renormalize   the k probabilities sum to 1 (as SeLaR, which the paper follows); false: they do not
    normalize     H divided by ln k, so that it lies in 0..1
    drift         "residual": both states on the residual stream; "normed": the last after the final norm
    heads         "auto": a set per kv head for a prompt, one per layer while decoding; "kv"; "layer"
    reduce        A is the "mean" over queries (Eq. 4), or the "sum" as in SnapKV's and RPC's code, with
                  which alpha = 0.9 acts like 0.997
    support       of the softmax in A: "auto": all keys for a prompt, the candidates while decoding; "all"
    budget        "uniform", or "adaptive": layers share by their mean E (Eqs. 9 and 10)

While decoding it follows RPC's procedure (every 1,024 generated tokens, prompt untouched, last 32 kept, pool
of 7). alpha = 1 is the attention-only parent: SnapKV for a prompt, RPC while decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvloom.compressors.base import Growing, compressors, in_proportion, last_rows
from kvloom.compressors.rpc import KERNEL as DECODE_KERNEL
from kvloom.compressors.snapkv import pooled
from kvloom.errors import MethodError
from kvloom.observe import EntropyKind, Records

if TYPE_CHECKING:
    from torch import Tensor

    from kvloom.cache_probe import CacheProbe


@compressors.register("infokv")
@dataclass(frozen=True, kw_only=True)
class InfoKV(Growing):
    """Scores rows by attention and by information."""

    alpha: float = 0.9
    tau: float = 1.0
    k: int = 256
    window: int = 64
    kernel: int = 9
    renormalize: bool = True
    normalize: bool = False
    drift: Literal["residual", "normed"] = "residual"
    heads: Literal["auto", "kv", "layer"] = "auto"
    reduce: Literal["mean", "sum"] = "mean"
    support: Literal["auto", "all"] = "auto"
    budget: Literal["uniform", "adaptive"] = "uniform"

    phases: ClassVar[frozenset[str]] = frozenset({"prefill", "decode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(1, window=self.window, kernel=self.kernel, k=self.k)
        self.check_among(
            drift=(self.drift, ("residual", "normed")),
            heads=(self.heads, ("auto", "kv", "layer")),
            reduce=(self.reduce, ("mean", "sum")),
            support=(self.support, ("auto", "all")),
            budget=(self.budget, ("uniform", "adaptive")),
        )
        if self.kernel % 2 == 0:
            raise MethodError(f"infokv: kernel must be odd, got {self.kernel}")
        if not 0 <= self.alpha <= 1:
            raise MethodError(f"infokv: alpha must lie from 0 to 1, got {self.alpha}")
        if not 0 <= self.tau < math.inf:
            raise MethodError(f"infokv: tau must be 0 or a positive number, got {self.tau}")

    @property
    def records(self) -> Records:
        return Records(
            entropy=EntropyKind(k=self.k, renormalize=self.renormalize),
            drift=self.drift,
            window=max(self.window, self.recent),
        )

    def protected(self, probe: CacheProbe) -> Tensor:
        return last_rows(probe, self.window)

    def score(self, probe: CacheProbe, layer: int) -> Tensor:
        attention = self._attention(probe, layer)  # (H, T), or (1, T)
        if self.alpha == 1:
            return attention
        information = self.information(probe, layer)
        if information.ndim == 2 and len(attention) == 1:  # heads hold different rows of the prompt
            attention = attention.expand(len(information), -1)
        return self.alpha * attention + (1 - self.alpha) * information.softmax(-1)

    def information(self, probe: CacheProbe, layer: int) -> Tensor:
        """E, (T,) or (H, T): the score of Eq. 7."""
        entropy = probe.side("entropy", layer)
        if self.normalize:
            entropy = entropy / math.log(max(2, min(self.k, probe.vocab_size)))
        return (probe.side("drift", layer) + self.tau) * entropy

    def _attention(self, probe: CacheProbe, layer: int) -> Tensor:
        is_decoding = probe.phase == "decode"
        size = self.recent if is_decoding else self.window
        support = "candidates" if is_decoding and self.support == "auto" else "all"
        weights = probe.window(layer, size, support=support)  # (H, G, W, T)
        seen = weights.mean(2) if self.reduce == "mean" else weights.sum(2)
        if self.heads == "layer" or (self.heads == "auto" and is_decoding):
            seen = seen.mean((0, 1), keepdim=True)
        if is_decoding:
            return pooled(seen, DECODE_KERNEL, without=~probe.is_candidate(layer)).mean(1)
        return pooled(seen, self.kernel, without=probe.is_last(layer, self.window)).mean(1)

    def budgets(self, probe: CacheProbe, total: int) -> list[int]:
        if self.budget == "uniform":
            return [total] * probe.num_layers
        means = [float(self.information(probe, layer).mean()) for layer in range(probe.num_layers)]
        return in_proportion(total * probe.num_layers, means, most=probe.num_rows)
