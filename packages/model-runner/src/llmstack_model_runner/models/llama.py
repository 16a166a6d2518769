"""Llama family: RoPE, RMS norms, grouped-query attention, gated feed-forward.

Llama, Mistral, Qwen2 and Qwen3 differ in biases, norms on queries and keys, and sliding windows. Each class reads its
configuration into `Settings`; the rest is shared, also with Gemma, Phi-3 and the mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from llmstack_model_files import extended_positions
from llmstack_model_runner.layers import (
    Embedding,
    OutputHead,
    RotaryEmbedding,
    WeightSlot,
    plan_layers,
)
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.layers.draft_heads import needs_draft_head
from llmstack_model_runner.layers.rotary import RopeParameters, parse_rope
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.layers.weight_slot import HasSlots
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.draft_head import DraftHead, HeadNames
from llmstack_model_runner.models.kv_spec import KVCaches, LayerKVSpec, ModelKVSpec
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayerSettings
from llmstack_model_runner.models.stages import stage_slots


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that a configuration is read into; `layers` has one entry per layer."""

    hidden_size: int
    vocab_size: int
    max_model_len: int
    is_tied: bool
    layers: list[LlamaLayerSettings]
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    logit_scale: float = 1.0


class Llama(CausalLM):
    """`LlamaForCausalLM`: Llama 1 to 3 and models of the same shape."""

    can_be_sharded: ClassVar[bool] = True
    can_omit_tokens: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        settings = self.read_settings(config)
        layer = settings.layers[0]
        self._sharding = sharding()
        self._hidden_size = settings.hidden_size
        self._like = torch.empty(0, dtype=dtype, device=device)  # the norm's scale may have another type
        self.kv_spec = ModelKVSpec(
            tuple(spec for entry in settings.layers if (spec := entry.kv_spec(dtype)) is not None),
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        ).of_rank(layer.num_heads)
        size, vocab_size = settings.hidden_size, settings.vocab_size
        self._tokens = Embedding(
            "model.embed_tokens",
            vocab_size,
            size,
            dtype=dtype,
            device=device,
            scale=settings.embedding_scale,
            is_vocabulary=True,
        )
        self._is_tied = settings.is_tied
        self._kept_layers: tuple[int, ...] = ()
        self._layer_to_state: dict[int, torch.Tensor] = {}
        ropes = _distinct([entry.rope for entry in settings.layers])
        self._rotaries = [RotaryEmbedding(rope, device) for rope in ropes]
        self._layers = [
            entry.make_layer(
                index, None if entry.rope is None else self._rotaries[ropes.index(entry.rope)], dtype, device
            )
            for index, entry in enumerate(settings.layers)
        ]
        self._norm = layer.norm("model.norm", size, dtype, device)
        self._draft_head: DraftHead | None = None
        names = self.draft_head_names(len(settings.layers)) if needs_draft_head() else None
        if names is not None:
            specs = [(entry, entry.kv_spec(dtype)) for entry in settings.layers]
            kind = next((entry for entry, spec in reversed(specs) if spec and spec.kind != "state"), layer)
            rotary = None if kind.rope is None else self._rotaries[ropes.index(kind.rope)]
            self._draft_head = DraftHead(names, kind, rotary, dtype, device, self._norm)
        self._head = OutputHead(
            vocab_size,
            size,
            dtype=dtype,
            device=device,
            tied_to=self._tokens if settings.is_tied else None,
            soft_cap=settings.logit_soft_cap,
            scale=settings.logit_scale,
        )
        if self._draft_head is not None:
            self._draft_head.note_share(self.slots())

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        has_bias = read_bool(config, "attention_bias", False)
        return read_llama(
            config,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames | None:
        """Names of the tensors of a draft head behind so many layers; None where the family has none."""
        return None

    def draft_head_spec(self) -> tuple[LayerKVSpec, float] | None:
        return None if self._draft_head is None else (self._draft_head.kv_spec, self._draft_head.share)

    @torch.inference_mode()
    def draft(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
    ) -> torch.Tensor:
        """Hidden states of the draft head."""
        if self._draft_head is None:
            raise ValueError("this model was made without its draft head")
        return self._draft_head(self.embed(token_ids), hidden, positions, metadata, kv_caches)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens as the first layer gets them."""
        return self._tokens(token_ids)

    def keep_states(self, layers: Sequence[int]) -> None:
        """Makes `forward` keep the states after so many layers, not all of them."""
        if any(not 0 <= layer < len(self._layers) for layer in layers):
            raise ValueError(f"states are kept after 0 to {len(self._layers) - 1} layers, not {list(layers)[:8]}")
        self._kept_layers, self._layer_to_state = tuple(layers), {}

    @property
    def kept_states(self) -> Sequence[torch.Tensor]:
        return [self._layer_to_state[layer] for layer in self._kept_layers]

    @property
    def vector_size(self) -> int | None:
        return self._tokens.size

    def slots(self) -> dict[str, WeightSlot]:
        own, layers = self._sharding, self._layers
        behind: list[HasSlots | None] = [self._norm, self._head, self._draft_head]
        return stage_slots(own, [self._tokens], layers, behind, is_tied=self._is_tied)

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values."""
        return {name: slot for layer in self._layers for name, slot in layer.optional_slots().items()}

    @property
    def _own_layers(self) -> list[DecoderLayer]:
        start = self.kv_spec.first_layer
        return self._layers[start : start + self.kv_spec.num_layers]

    def is_ignored(self, name: str) -> bool:
        """Frequencies of old checkpoints, and a copy of a tied head."""
        return name == "lm_head.weight" or super().is_ignored(name)

    def limit_context(self, max_model_len: int) -> None:
        """Chooses the factors of RoPE for the longest context."""
        for rotary in self._rotaries:
            rotary.limit_positions(max_model_len)

    def hold_positions(self, num_positions: int) -> None:
        """Computes the tables of RoPE."""
        for rotary in self._rotaries:
            rotary.hold_positions(num_positions)

    def finish_loading(self) -> None:
        if self._sharding.is_last_stage:
            self._head.finish_loading()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm, or after this stage's last layer."""
        own = self.kv_spec
        planned = plan_layers(metadata, kv_caches, own.sliding_windows, own.first_attention)
        given = metadata.vectors
        hidden, residual = self._enter(token_ids, given)
        for number, (layer, kv_cache, plan) in enumerate(zip(self._own_layers, kv_caches, planned, strict=True)):
            if number in self._kept_layers:
                self._layer_to_state[number] = hidden.clone() if residual is None else hidden + residual
            hidden, residual = layer(hidden, residual, LayerStep(positions, kv_cache, *plan))
            hidden = hidden if given is None else given.add_deep(number, hidden)
        if residual is None or self._sharding.is_last_stage:
            return self._norm.add(hidden, residual)[0]
        self._leave(hidden, residual)
        return hidden

    def _enter(self, token_ids: torch.Tensor, given: StepVectors | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and residual before this stage's first layer."""
        if self._sharding.is_first_stage:
            return self._tokens(token_ids, given=given), None
        shape = (token_ids.shape[0], self._hidden_size)
        hidden, residual = self._sharding.receive(2, self._like, shape)
        return hidden, residual

    def _leave(self, hidden: torch.Tensor, residual: torch.Tensor) -> None:
        """Gives the next stage what `_enter` takes there."""
        self._sharding.send([hidden, residual])

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows."""
        return self._head(hidden)


class Mistral(Llama):
    """`MistralForCausalLM`: no biases, one sliding window for all layers."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = config.get("sliding_window")
        return read_llama(config, None if window is None else read_int(config, "sliding_window"))


class Qwen2(Llama):
    """`Qwen2ForCausalLM`: biases on queries, keys and values; a sliding window on the later layers if enabled."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = read_int(config, "sliding_window", 4096) if read_bool(config, "use_sliding_window", False) else None
        return read_llama(config, window, has_qkv_bias=True)


class Qwen3(Llama):
    """`Qwen3ForCausalLM`: norms on the heads of queries and keys, explicit head size."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        has_bias = read_bool(config, "attention_bias", False)
        window = read_int(config, "sliding_window", 4096) if read_bool(config, "use_sliding_window", False) else None
        return read_llama(
            {"head_dim": 128, **config},
            window,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_qk_norm=True,
        )


def read_llama(
    config: Mapping[str, Any], sliding_window: int | None = None, *, is_partly_rotated: bool = False, **variants: Any
) -> Settings:
    """Reads the fields that all configurations of the family have.

    `sliding_window` applies to the layers that the configuration names, or to all; `is_partly_rotated`: see
    `parse_rope`; `variants` are further fields of every layer's settings.
    """
    refuse(config, "pretraining_tp", 1)
    hidden_size = read_int(config, "hidden_size")
    num_heads = read_int(config, "num_attention_heads")
    num_kv_heads = read_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads.")
    head_dim = read_int(config, "head_dim", hidden_size // num_heads)
    max_model_len = read_int(config, "max_position_embeddings", 2048)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": read_int(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "eps": read_float(config, "rms_norm_eps", 1e-6),
        "rope": parse_rope(config, head_dim, max_model_len, is_partial=is_partly_rotated),
        "activation": str(config.get("hidden_act") or "silu"),
        **variants,
    }
    windows = _sliding_windows(config, read_int(config, "num_hidden_layers"), sliding_window)
    return Settings(
        hidden_size=hidden_size,
        vocab_size=read_int(config, "vocab_size"),
        max_model_len=extended_positions(config, max_model_len),
        is_tied=read_bool(config, "tie_word_embeddings", False),
        layers=[LlamaLayerSettings(sliding_window=window, **fields) for window in windows],
    )


def _distinct(ropes: list[RopeParameters | None]) -> list[RopeParameters]:
    return [rope for index, rope in enumerate(ropes) if rope is not None and rope not in ropes[:index]]


def _sliding_windows(config: Mapping[str, Any], num_layers: int, sliding_window: int | None) -> list[int | None]:
    """Each layer's window: by `layer_types`, else from layer `max_window_layers` on, else in all layers."""
    if sliding_window is None:
        return [None] * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [sliding_window if kind == "sliding_attention" else None for kind in kinds]
    first = config.get("max_window_layers", 0)
    return [sliding_window if index >= first else None for index in range(num_layers)]
