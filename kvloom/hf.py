"""The seam: a transformers causal decoder, and all that kvloom asks of it.

No other room names transformers' internals, but for what was split off here (`attention_function`, `taps`,
`fingerprint`), and `cache` and `families`, which read configs. A forward
is given token ids, positions, a `SplicedCache` and a `Plan`; the plan travels to the attention function as a
keyword argument, so that two threads never share state.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvloom.attention import ByPosition, Heads, Plan
from kvloom.attention_function import ATTENTION
from kvloom.cache import CACHE_ARGUMENT, KVShape, SplicedCache
from kvloom.errors import UnsupportedModel
from kvloom.fingerprint import fingerprint
from kvloom.taps import Given, Heard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transformers import PreTrainedModel


class Decoder:
    """A transformers causal language model, switched to kvloom's attention function.

    The switch changes no result: without a plan the function computes what SDPA or eager attention would.
    Raises ``UnsupportedModel`` for what is not a decoder with rotary position embeddings; whether its KV
    cache can really be moved is for `kvloom.families.check` to say.
    """

    def __init__(self, model: PreTrainedModel, *, tokenizer_identity: str = "") -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModel(
                f"{_name(model)} is an encoder-decoder; kvloom needs a decoder-only language model"
            )
        if model.get_output_embeddings() is None:
            raise UnsupportedModel(
                f"{_name(model)} has no language-model head; load it with AutoModelForCausalLM"
            )
        self.model = model.eval()
        self.name = _name(model)
        self.config = model.config.get_text_config(decoder=True)
        self.body: Any = model.get_decoder()
        self._layers_attribute = _layers_attribute(self.body, self.config.num_hidden_layers, self.name)
        self.num_layers: int = self.config.num_hidden_layers
        self.rotary: Any = getattr(self.body, "rotary_emb", None)
        if self.rotary is None:
            raise UnsupportedModel(
                f"{self.name} has no rotary position embedding; kvloom moves keys by rotating them and "
                f"cannot use this model"
            )
        self._own_attention: Any = model.config._attn_implementation
        self._tokenizer_identity = tokenizer_identity
        self._fingerprint: str | None = None
        self._fingerprint_lock = threading.Lock()
        model.set_attn_implementation(ATTENTION)
        try:
            self.kv_shapes, self.heads = self._measure()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives the model its own attention function back."""
        self.model.set_attn_implementation(self._own_attention)

    # --- what it is

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """Tokens that the model takes in all, or None if its config does not say.

        LongRoPE changes its frequencies beyond the original length, which moves no key rightly: there it is
        that length.
        """
        limit = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or limit
            return min(limit, original) if limit else original
        return limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id at which the model's configs say that generation ends."""
        ids: set[int] = set()
        for config in (self.model.generation_config, self.config):
            eos = getattr(config, "eos_token_id", None)
            ids.update([eos] if isinstance(eos, int) else eos or [])
        return frozenset(ids)

    def new_cache(self, capacity: int) -> SplicedCache:
        """An empty cache of this model with room for `capacity` rows."""
        return SplicedCache(self.kv_shapes, capacity, dtype=self.dtype, device=self.device)

    def _measure(self) -> tuple[list[KVShape], list[Heads]]:
        """Each layer's KV shape and heads, read off a one-token forward: proof that the attention function is
        called.
        """
        probe = _ShapeProbe()
        self._run(
            self.body, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), None, probe
        )
        if sorted(probe.shapes) != list(range(self.num_layers)):
            raise UnsupportedModel(
                f"{self.name}: {len(probe.shapes)} of {self.num_layers} layers use transformers' attention "
                f"interface; "
                "kvloom needs all of them to be ordinary attention layers"
            )
        layers = range(self.num_layers)
        return [probe.shapes[layer] for layer in layers], [probe.heads[layer] for layer in layers]

    # --- forwards

    def forward(self, token_ids: Tensor, positions: Tensor, cache: SplicedCache, *, num_new: int) -> Tensor:
        """(V,) float32 logits after the last of token_ids (S,) at positions (S,), through every layer.

        The last `num_new` tokens are appended to the cache; earlier ones overwrite its `overwriting` rows.
        """
        plan = self._announced(token_ids, positions, cache, num_new)
        output = self._run(self.model, token_ids, positions, cache, plan, logits_to_keep=1)
        return output.logits[0, -1].float()

    def follow(self, token_ids: Tensor, cache: SplicedCache) -> Tensor:
        """(S, V) float32 logits after each of token_ids (S,), which go on after the cache and are appended
        to it.
        """
        positions = cache.next_position + torch.arange(len(token_ids))
        plan = self._announced(token_ids, positions, cache, len(token_ids))
        output = self._run(self.model, token_ids, positions, cache, plan, logits_to_keep=len(token_ids))
        return output.logits[0].float()

    def fill(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: SplicedCache,
        *,
        num_new: int,
        num_layers: int | None = None,
        plan: Any = None,
    ) -> None:
        """As `forward`, for the cache alone: no language-model head, only the first `num_layers` layers if
        given.

        `plan` wraps or replaces the by-position plan: a callable from one `ByPosition` to the plan to use.
        """
        by_position = self._announced(token_ids, positions, cache, num_new)
        body = self.body if num_layers is None else self._truncated(num_layers)
        self._run(body, token_ids, positions, cache, by_position if plan is None else plan(by_position))

    def observe(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: SplicedCache,
        listen: Callable[[int, Tensor], None] | None = None,
        plan: Callable[[ByPosition], Plan] | None = None,
    ) -> Tensor:
        """(S, d) final hidden states of token_ids (S,), appended to the cache; `head` makes logits of them.

        `listen(layer, states)` hears each layer's output (S, d) on the residual stream, before the final
        norm. The layers are wrapped in a view of the decoder made for this call, so that nothing stays on
        the model and two threads never hear each other.
        """
        by_position = self._announced(token_ids, positions, cache, len(token_ids))
        layers = getattr(self.body, self._layers_attribute)
        heard = layers if listen is None else [Heard(layer, n, listen) for n, layer in enumerate(layers)]
        body = self._with_layers(heard)
        return self._run(
            body, token_ids, positions, cache, by_position if plan is None else plan(by_position)
        ).last_hidden_state[0]

    @torch.no_grad()
    def head(self, states: Tensor) -> Tensor:
        """(S, V) float32 logits of final hidden states (S, d), by the model's own code: with its scale and
        soft-cap.
        """
        view = copy.copy(self.model)
        view._modules = dict(self.model._modules)
        view._modules[_attribute_of(self.model, self.body, self.name)] = Given(states[None])  # type: ignore[assignment]
        return view(input_ids=torch.zeros((1, len(states)), dtype=torch.int64)).logits[0].float()

    def _announced(
        self, token_ids: Tensor, positions: Tensor, cache: SplicedCache, num_new: int
    ) -> ByPosition:
        first_new = len(token_ids) - num_new
        cache.announce(token_ids[first_new:], positions[first_new:])
        return ByPosition(positions.to(self.device), cache.key_positions)

    @torch.no_grad()
    def _run(
        self,
        module: Any,
        token_ids: Tensor,
        positions: Tensor,
        cache: SplicedCache | None,
        plan: Any,
        **kwargs: Any,
    ) -> Any:
        if self.config._attn_implementation != ATTENTION:
            raise UnsupportedModel(
                f"{self.name} was switched to {self.config._attn_implementation!r} attention after kvloom "
                f"took it, "
                "which would compute wrong caches; make a new Loom of it"
            )
        return module(
            input_ids=token_ids[None].to(self.device),
            position_ids=positions[None].to(self.device),
            use_cache=cache is not None,
            kvloom=plan,
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )

    def _truncated(self, num_layers: int) -> Any:
        """A view of the decoder body that stops after `num_layers` layers and shares its weights."""
        if num_layers == self.num_layers:
            return self.body
        return self._with_layers(list(getattr(self.body, self._layers_attribute))[:num_layers])

    def _with_layers(self, layers: Iterable[nn.Module]) -> Any:
        """A view of the decoder body with other layers; it shares the weights, and the body stays as it
        is.
        """
        view = copy.copy(self.body)
        view._modules = dict(self.body._modules)
        view._modules[self._layers_attribute] = nn.ModuleList(layers)
        return view

    def synchronize(self) -> None:
        """Returns once all work given to the device is done, so that a clock read next is honest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- rotary position embedding

    @torch.no_grad()
    def rotation(self, delta: int) -> Tensor:
        """(D, D) float32 matrix that moves keys by `delta` positions: ``keys @ rotation(delta)``."""
        return self.rotations(torch.tensor([delta]))[0]

    @torch.no_grad()
    def rotations(self, deltas: Tensor) -> Tensor:
        """(N, D, D) float32: the matrices that move keys by each of `deltas` (N,) int64 positions.

        R(p + d) k = R(d) R(p) k, so one rotation by the difference is exact. The matrix is the model's own
        rotary function applied to the unit vectors, which makes it right for interleaved, half-split and
        partial rotary alike; cos and sin are divided by the attention scaling that YaRN and LongRoPE fold
        into them.
        """
        head_dim, num = self.kv_shapes[0].key_dim, len(deltas)
        # (N, 1, D, D): D "tokens" for each delta, one per unit vector
        basis = torch.eye(head_dim, device=self.device).expand(num, 1, -1, -1)
        places = deltas.to(self.device)[:, None].expand(-1, head_dim)
        cos, sin = self.rotary(basis[:, 0], position_ids=places)
        scale = float(getattr(self.rotary, "attention_scaling", 1.0))
        cos, sin = cos / scale, sin / scale
        apply = self._rotary_function()
        try:
            return apply(basis, basis, cos, sin)[1][:, 0].float()
        except RuntimeError:
            # Phi and GPT-NeoX slice the rotated part off before they call the function.
            rotated = cos.shape[-1]
            part = apply(basis[..., :rotated], basis[..., :rotated], cos, sin)[1]
            return torch.cat([part, basis[..., rotated:]], -1)[:, 0].float()

    def rotary_similarity(self, deltas: Tensor) -> Tensor:
        """(D,) float32, at most 1: how alike the rotations of two positions are that lie `deltas` (D,) apart.

        The mean over rotary pairs of the cosine of the angle between them: the cosine similarity that keys
        and queries alike but for their positions would have.
        """
        basis = torch.zeros(1, device=self.device)
        cos, _ = self.rotary(basis, position_ids=deltas[None].to(self.device))
        return cos[0].float().mean(-1).cpu() / float(getattr(self.rotary, "attention_scaling", 1.0))

    def _rotary_function(self) -> Any:
        attention_module = sys.modules[
            type(_attention_of(getattr(self.body, self._layers_attribute)[0])).__module__
        ]
        function = getattr(attention_module, "apply_rotary_pos_emb", None)
        if function is None:
            raise UnsupportedModel(
                f"{self.name}: no rotary function found beside its attention; kvloom cannot move its keys"
            )
        return function

    # --- identity

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what a KV cache depends on: config with rope, every weight, dtype, and the
        tokenizer.
        """
        with self._fingerprint_lock:
            if self._fingerprint is None:
                self._fingerprint = fingerprint(self.model, self.config, self._tokenizer_identity)
            return self._fingerprint


class _ShapeProbe:
    """A plan that notes each layer's KV shape and heads, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.heads: dict[int, Heads] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
        self.shapes[layer] = KVShape(keys.shape[0], keys.shape[2], values.shape[2])
        self.heads[layer] = heads
        return query.new_zeros((*query.shape[:2], values.shape[2]))


def _attribute_of(model: PreTrainedModel, body: nn.Module, name: str) -> str:
    for attribute, module in model.named_children():
        if module is body:
            return attribute
    raise UnsupportedModel(
        f"{name} does not hold its decoder directly; kvloom reads text from text models only"
    )


def _name(model: PreTrainedModel) -> str:
    path = getattr(model.config, "_name_or_path", "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__


def _layers_attribute(body: Any, num_layers: int, name: str) -> str:
    for attribute, module in body.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return attribute
    raise UnsupportedModel(f"{name}: no list of {num_layers} decoder layers found in {type(body).__name__}")


def _attention_of(layer: nn.Module) -> nn.Module:
    for module in layer.modules():
        if hasattr(module, "layer_idx") and "attention" in type(module).__name__.lower():
            return module
    raise UnsupportedModel(f"{type(layer).__name__} has no attention module that kvloom knows")


def cat_ids(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one (T,) int64 tensor; empty when there are none."""
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)
