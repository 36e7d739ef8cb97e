"""Stand-ins for parts of a decoder, put into views of it that live for one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Heard(nn.Module):
    """A decoder layer whose output is heard; to all who look at it, it is the layer itself."""

    def __init__(self, layer: nn.Module, index: int, listen: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self.__dict__.update(_layer=layer, _index=index, _listen=listen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(*args, **kwargs)
        self._listen(self._index, (output[0] if isinstance(output, tuple) else output)[0])
        return output


class Given(nn.Module):
    """Stands in for the decoder body where its final hidden states are known already."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.states)  # type: ignore[arg-type]
