"""EAGLE's draft heads: decoder layers over hidden states (Li et al., 2024, 2025).

EAGLE 1 reads the states after the last norm, and guesses by the output head of the served model. EAGLE 3 reads those
after three layers, and has an output head of its own, most often for the more frequent tokens alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import (
    Embedding,
    Linear,
    OutputHead,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
    plan_layers,
)
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.layers.weight_slot import HasSlots
from llmstack_model_runner.models.base import CausalLM, Loadable
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.kv_spec import KVCaches, ModelKVSpec
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import LlamaLayer, LlamaLayerSettings, SelfAttention, make_feed_forward

_NESTED = ("transformer_layer_config", "model")
"""Fields with the sizes of the layers, in the configurations of speculators and of older heads."""


@dataclass(frozen=True, slots=True)
class ServedSizes:
    """Sizes of the served model that a head has to fit.

    Attributes:
        tensor_names: Tensors of the head's checkpoint, without a prefix.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    tensor_names: Collection[str]


class EagleHead(Loadable):
    """A head of EAGLE 1, and what the one of EAGLE 3 shares with it.

    Attributes:
        kept_layers: Numbers of layers after which it reads the served model's states; none for those after the last
            norm.
        rotary: Its rotary embedding, if it has one.
        size: Numbers of its states.
    """

    root: ClassVar[str] = ""

    def __init__(
        self, config: Mapping[str, Any], served: ServedSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ValueError where the head does not fit the served model, or is of another kind."""
        self._settings, self._served = read_settings(config), served
        layer = self._settings.layers[0]
        self.kept_layers = self._read_layers(config)
        self.kv_spec = head_kv_spec(self._settings, dtype)
        self.rotary = None if layer.rope is None else RotaryEmbedding(layer.rope, device)
        self.size = size = layer.hidden_size
        self._first = FirstLayer("layers.0.", self._first_settings(layer), self.rotary, dtype, device)
        self._others = [
            LlamaLayer(f"layers.{number}.", layer, self.rotary, dtype, device)
            for number in range(1, len(self._settings.layers))
        ]
        has_bias = "fc.bias" in served.tensor_names
        self._join: Linear | None = None
        if inputs := self._join_inputs(size):
            self._join = Linear(inputs, {"fc": size}, has_bias=has_bias, dtype=dtype, device=device)
        self._tokens: Embedding | None = None
        self._make_ends(config, dtype, device)

    def _read_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        refuse(config, "add_para_norm", False)
        refuse(config, "layernorms", False)
        return ()

    def _first_settings(self, layer: LlamaLayerSettings) -> LlamaLayerSettings:
        return layer

    def _join_inputs(self, size: int) -> int:
        """Width of what `fc` maps to states of the head; 0 for a head without it."""
        if size != self._served.hidden_size:
            raise ValueError(
                f"its states have {size} numbers, and those of the served model {self._served.hidden_size}"
            )
        return 2 * size

    def _make_ends(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Makes what is before and behind the layers: nothing, since both are the served model's."""

    def _parts(self) -> list[HasSlots | None]:
        return [self._join, self._first, *self._others]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots(self._parts())

    def rename(self, name: str) -> str:
        """Names of the hub: some have the prefix of a model, and EAGLE 3 calls its layer the middle one."""
        name = name.removeprefix("model.")
        return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name

    def is_ignored(self, name: str) -> bool:
        """The maps of tokens are read apart; copies of the served model's ends are of no use."""
        ends = ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight", "layers.0.input_layernorm.weight")
        return self.rename(name) in ends or super().is_ignored(name)

    def read_states(self, model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        """The states that the head keeps of places that `model` has computed: [n, hidden_size] to [n, own size]."""
        return hidden

    def advance(
        self, model: CausalLM, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor,
        metadata: AttentionMetadata, kv_caches: KVCaches,
    ) -> torch.Tensor:  # fmt: skip
        """States that guess the token after the next, from those at these places and the tokens that follow them."""
        embedded = model.embed(token_ids) if self._tokens is None else self._tokens(token_ids)
        seen, residual = self._enter(embedded, states)
        plans = plan_layers(metadata, kv_caches, self.kv_spec.sliding_windows)
        hidden, total = self._first(seen, residual, LayerStep(positions, kv_caches[0], *plans[0]))
        for layer, kv_cache, plan in zip(self._others, kv_caches[1:], plans[1:], strict=True):
            hidden, total = layer(hidden, total, LayerStep(positions, kv_cache, *plan))
        return hidden + total

    def _enter(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the first attention, and the residual."""
        if self._join is None:
            raise ValueError("the head joins nothing")
        joined = self._join(torch.cat([embedded, states], dim=-1))
        return joined, joined

    def guess(self, model: CausalLM, states: torch.Tensor) -> torch.Tensor:
        """Logits of tokens of the served model, or of those that `target_ids` names: [n, tokens]."""
        return model.compute_logits(states)

    @property
    def target_ids(self) -> torch.Tensor | None:  # [tokens] int64
        """The token of each of the head's logits; None where they are the served model's."""
        return None


class Eagle3Head(EagleHead):
    """A head of EAGLE 3.

    Attributes:
        num_tokens: Tokens that it can guess.
    """

    def _read_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        for name in ("parallel_drafting", "norm_before_fc", "fc_norm", "norm_output"):
            refuse(config, name, False)
        nested = config.get("eagle_config")
        nested = nested if isinstance(nested, Mapping) else {}
        if not read_bool(nested, "use_aux_hidden_state", True):
            return ()
        name, count = "eagle_aux_hidden_state_layer_ids", self._served.num_layers
        found = nested.get(name) or config.get(name) or (2, count // 2, count - 3)
        if not all(type(layer) is int for layer in found) or not 0 < len(found) <= count:
            raise ValueError(f"{name} must be a list of numbers of layers, got {str(found)[:64]}")
        return tuple(found)

    def _first_settings(self, layer: LlamaLayerSettings) -> LlamaLayerSettings:
        return replace(layer, attention_size=2 * layer.hidden_size)

    def _join_inputs(self, size: int) -> int:
        if self.kept_layers:
            return len(self.kept_layers) * self._served.hidden_size
        if size != self._served.hidden_size:
            raise ValueError(
                f"its states have {size} numbers, and those of the served model {self._served.hidden_size}"
            )
        return 0

    def _make_ends(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        layer, vocab_size = self._settings.layers[0], self._settings.vocab_size
        size = layer.hidden_size
        if "embed_tokens.weight" in self._served.tensor_names:
            self._tokens = Embedding("embed_tokens", vocab_size, size, dtype=dtype, device=device, is_vocabulary=True)
        elif size != self._served.hidden_size:
            raise ValueError("it has no embedding, and that of the served model has another size")
        self._input_norm, self._hidden_norm, self._norm = (
            layer.norm(name, size, dtype, device)
            for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
        )
        self._is_residual_normed = read_bool(config, "norm_before_residual", False)
        self.num_tokens = read_int(config, "draft_vocab_size", vocab_size)
        self._head = OutputHead(self.num_tokens, size, dtype=dtype, device=device)
        self._target_ids: torch.Tensor | None = None

    def _parts(self) -> list[HasSlots | None]:
        return [*super()._parts(), self._tokens, self._input_norm, self._hidden_norm, self._norm, self._head]

    def finish_loading(self) -> None:
        self._head.finish_loading()

    def map_tokens(self, offsets: torch.Tensor | None) -> None:
        """Takes the offset of each draft token's id to the served model's id; None if both have the same ids.

        Raises:
            ValueError: Their number is wrong, or an id is outside of the served vocabulary.
        """
        if offsets is None:
            if self.num_tokens != self._served.vocab_size:
                raise ValueError(f"it guesses {self.num_tokens} tokens, and has no tensor 'd2t' that says which")
            return
        if len(offsets) != self.num_tokens:
            raise ValueError(f"it guesses {self.num_tokens} tokens, and its tensor 'd2t' has {len(offsets)} numbers")
        ids = torch.arange(self.num_tokens) + offsets.to(torch.int64)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._served.vocab_size:
            raise ValueError("its tensor 'd2t' does not name tokens of the served model")
        self._target_ids = ids.to(self._norm.weight.device)

    @property
    def target_ids(self) -> torch.Tensor | None:
        return self._target_ids

    def read_states(self, model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        """The states after the layers that it reads, joined."""
        return hidden if self._join is None else self._join(torch.cat(list(model.kept_states), dim=-1))

    def _enter(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._hidden_norm(states)
        seen = torch.cat([self._input_norm(embedded), normed], dim=-1)
        return seen, normed if self._is_residual_normed else states

    def guess(self, model: CausalLM, states: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(states))


class FirstLayer:
    """A decoder layer whose input is made ready outside: attention, and feed-forward behind a norm."""

    def __init__(
        self, prefix: str, settings: LlamaLayerSettings, rotary: RotaryEmbedding | None,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._attention = SelfAttention(f"{prefix}self_attn.", settings, rotary, dtype, device)
        self._norm: RMSNorm = settings.norm(f"{prefix}post_attention_layernorm", settings.hidden_size, dtype, device)
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        return collect_slots([self._attention, self._norm, self._feed_forward])

    def __call__(
        self, seen: torch.Tensor, residual: torch.Tensor, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the residual that is added to it."""
        attended = self._attention(seen, step)
        normed, total = self._norm.add(attended, residual)
        return self._feed_forward(normed), total


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The sizes of a head's layers, which are those of Llama.

    Raises:
        ValueError: Its layers are of another kind, or a size is missing.
    """
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), config)
    kind = nested.get("model_type", "llama")
    if kind not in ("llama", "eagle", "qwen2", "qwen3", "mistral"):
        raise ValueError(f"config.json: draft heads with layers of {str(kind)[:64]!r} are not supported; Llama's are")
    has_bias = read_bool(nested, "attention_bias", False)
    return read_llama(nested, has_qkv_bias=read_bool(nested, "qkv_bias", has_bias), has_attention_out_bias=has_bias)


def head_kv_spec(settings: Settings, dtype: torch.dtype) -> ModelKVSpec:
    """The memory of a head's layers for a token."""
    layers = tuple(spec for layer in settings.layers if (spec := layer.kv_spec(dtype)) is not None)
    return ModelKVSpec(layers, settings.vocab_size, settings.max_model_len).of_rank(settings.layers[0].num_heads)
