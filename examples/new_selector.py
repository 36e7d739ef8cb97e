"""A selection method of your own: one class, one registration. `tests/test_examples.py` runs this file."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvloom.probe import Probe
from kvloom.selectors import Selector, selectors


@selectors.register("rare")
@dataclass(frozen=True, kw_only=True)
class Rare(Selector):
    """Recomputes the tokens that are rarest in the context, and the question's attention breaks ties."""

    attention: float = 0.5  # weight of the attention, 0..1

    def score(self, probe: Probe) -> Tensor:
        _, places, counts = probe.token_ids.unique(return_inverse=True, return_counts=True)
        rarity = 1 / counts[places].float()
        last = probe.num_layers - 1
        attention = probe.reduced("mass", layers=[last])[0, 0]
        return torch.lerp(rarity, attention / attention.max(), self.attention)
