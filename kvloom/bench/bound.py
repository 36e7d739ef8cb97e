"""Bounds: the least time that a model's arithmetic can take on a machine whose rates were measured.

Work is counted from the model's shapes alone. With Pl the weights of a layer's linear maps, a the query heads
times (key dim + value dim), c the kv heads times (key dim + value dim), V x d the language-model head:

    linear     2 rows Pl                      FLOPs a layer, for the rows that pass through it
    attention  2 a sum(p + 1)                 FLOPs a layer, p the rows' positions: the causal mask, no more
    head       2 V d                          FLOPs, for one row
    KV read    (max p + 1) c itemsize         bytes a layer, each once
    splice     2 T L c itemsize               bytes: the KV of T rows read once and written once
    load       T L c itemsize                 bytes of chunks from a disk store, read once from page cache;
                                              from memory nothing moves

    seconds    linear / M(rows) + head / M(1) + max(attention / M(rows), KV read / R)
               bytes moved / C, bytes loaded / R

M(rows) is the rate at which the model's own weight matrices are multiplied with that many rows, R and C the
rates of reading and of copying memory (`kvloom.bench.rates`). Norms, rotary embedding, softmax, activations
and everything that is not a number of the model count as free, so the bound cannot be reached in full.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from kvloom.errors import MethodError
from kvloom.selectors.infoflow import InfoFlow, resolve_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kvloom.hf import Decoder
    from kvloom.prompt import Prompt
    from kvloom.selectors import Selector


class MachineRates(Protocol):
    """What a machine does in a second."""

    def matmul(self, rows: int) -> float: ...  # FLOPs, with that many rows

    @property
    def read(self) -> float: ...  # bytes

    @property
    def copy(self) -> float: ...  # bytes, those read and those written


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """What of a model decides its arithmetic; a number per layer, in elements of `itemsize` bytes."""

    linear: tuple[int, ...]  # (L,) weights of the linear maps: multiply-adds of a row
    pair: tuple[int, ...]  # (L,) multiply-adds of a query and a key that it sees, all heads
    kv: tuple[int, ...]  # (L,) numbers in the cache for a token
    head: int  # weights of the language-model head
    itemsize: int  # bytes

    @classmethod
    def of(cls, decoder: Decoder) -> Shapes:
        """Those of the model. Raises ``MethodError`` where a layer computes with other than linear maps."""
        weights = linear_weights(decoder)
        num_heads = decoder.config.num_attention_heads
        return cls(
            linear=tuple(sum(weight.numel() for weight in layer) for layer in weights),
            pair=tuple(num_heads * (shape.key_dim + shape.value_dim) for shape in decoder.kv_shapes),
            kv=tuple(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in decoder.kv_shapes),
            head=decoder.model.get_output_embeddings().weight.numel(),  # type: ignore[union-attr] # Decoder checks
            itemsize=decoder.dtype.itemsize,
        )

    @property
    def num_layers(self) -> int:
        return len(self.linear)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a token's forward reads: the layers' linear maps and the head."""
        return (sum(self.linear) + self.head) * self.itemsize

    def kv_bytes(self, num_tokens: int, num_layers: int | None = None) -> int:
        """Bytes of the KV of so many tokens, in the first layers or all."""
        return num_tokens * sum(self.kv[:num_layers]) * self.itemsize


def linear_weights(decoder: Decoder) -> list[list[Tensor]]:
    """Each layer's weight matrices (out, in), as the model multiplies with them.

    Raises ``MethodError`` where a layer computes with other than linear maps, such as experts.
    """
    layers = next(
        module
        for module in decoder.body.children()
        if isinstance(module, nn.ModuleList) and len(module) == decoder.num_layers
    )
    found = []
    for layer in layers:
        linear = [module.weight for module in layer.modules() if isinstance(module, nn.Linear)]
        if sum(p.ndim > 1 for p in layer.parameters()) != len(linear):
            raise MethodError(
                f"{decoder.name} computes with more than linear maps (experts?), whose arithmetic the bound "
                "does not count; bench a dense model"
            )
        found.append(linear)
    return found


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of one part of the time to first token; `a + b` is the one after the other."""

    rows: int = 1  # that go through the linear maps together
    linear_flops: int = 0
    head_flops: int = 0
    attention_flops: int = 0
    kv_read_bytes: int = 0
    moved_bytes: int = 0
    loaded_bytes: int = 0

    @property
    def flops(self) -> int:
        return self.linear_flops + self.head_flops + self.attention_flops

    def seconds(self, machine: MachineRates) -> float:
        """The least that this work takes at the machine's rates."""
        found = self.moved_bytes / machine.copy + self.loaded_bytes / machine.read
        if self.flops:
            rate = machine.matmul(self.rows)
            found += self.linear_flops / rate + self.head_flops / machine.matmul(1)
            found += max(self.attention_flops / rate, self.kv_read_bytes / machine.read)
        return found

    def as_dict(self) -> dict[str, int]:
        """Plain data, for JSON."""
        return asdict(self) | {"flops": self.flops}


def forward(
    shapes: Shapes, positions: Iterable[int], *, num_layers: int | None = None, head_rows: int = 1
) -> Work:
    """Rows at these positions through the first layers, or all, each row seeing the keys up to its own."""
    places = list(positions)
    if not places:
        return Work()
    return Work(
        rows=len(places),
        linear_flops=2 * len(places) * sum(shapes.linear[:num_layers]),
        head_flops=2 * head_rows * shapes.head,
        attention_flops=2 * sum(place + 1 for place in places) * sum(shapes.pair[:num_layers]),
        kv_read_bytes=shapes.kv_bytes(max(places) + 1, num_layers),
    )


def step_seconds(shapes: Shapes, num_tokens: int, machine: MachineRates) -> float:
    """The least for a decode step behind so many tokens: every weight and the whole cache read once."""
    return (shapes.weight_bytes + shapes.kv_bytes(num_tokens)) / machine.read


def scoring(shapes: Shapes, selector: Selector, prompt: Prompt) -> Work:
    """What the selector computes to choose rows: InfoFlow runs the tokens that ask up to its last scored
    layer; who needs fresh layers runs the whole context through them; others compute nothing.
    """
    num_context = len(prompt.context_ids)
    if selector.fresh_layers:
        return forward(shapes, range(num_context), num_layers=selector.fresh_layers, head_rows=0)
    if isinstance(selector, InfoFlow):
        num_asking = prompt.question_span.stop if selector.query == "question" else len(prompt.question_ids)
        last = max(resolve_layers(selector.layers, shapes.num_layers))
        asking = range(num_context, num_context + num_asking)
        return forward(shapes, asking, num_layers=last + 1, head_rows=0)
    return Work()


def first_token(
    shapes: Shapes,
    selector: Selector,
    prompt: Prompt,
    rows: Sequence[int],
    *,
    from_disk: bool,
    is_scored: bool,
) -> dict[str, Work]:
    """The work of each part of the time to first token, under the names of `Trace.seconds`; `rows` are the
    context rows computed again; nothing is scored where no row has a choice, as of a single chunk.
    """
    num_context, num_tokens = len(prompt.context_ids), prompt.num_tokens
    if not selector.reuses:
        return {"recompute": forward(shapes, range(num_tokens))}
    held = shapes.kv_bytes(num_context)
    return {
        "load": Work(loaded_bytes=held if from_disk else 0),
        "splice": Work(moved_bytes=2 * held),
        "score": scoring(shapes, selector, prompt) if is_scored else Work(),
        "recompute": forward(shapes, [*rows, *range(num_context, num_tokens)]),
    }


def compare(seconds: float, bound_s: float) -> dict[str, Any]:
    """Measured and least seconds, and the quotient, which is None where the bound is nothing."""
    return {"seconds": seconds, "bound_s": bound_s, "quotient": seconds / bound_s if bound_s else None}
