"""Falcon-H1: a state space of Mamba-2 and attention side by side in every block.

A block is two layers for the KV storage: the first has the state, the second has keys and values, and the feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmstack_model_runner.layers import RMSNorm, RotaryEmbedding, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.state_space import StateSpaceSettings
from llmstack_model_runner.models.bamba import Bamba, read_state_space
from llmstack_model_runner.models.config_values import read_bool, read_factor, read_float, read_int
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayer, LlamaLayerSettings
from llmstack_model_runner.models.state_layer import StateLayerSettings, mix_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHalfSettings(StateLayerSettings):
    """Sizes of the first half of a block.

    Attributes:
        in_scale: Factor of the normalised input.
        out_scale: Factor of the output.
    """

    in_scale: float
    out_scale: float

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The half without weights."""
        return StateHalf(f"model.layers.{number // 2}.", self, dtype, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHalfSettings(LlamaLayerSettings):
    """Sizes of the second half of a block.

    Attributes:
        in_scales: Factors of the normalised inputs of attention and of feed-forward.
        out_scales: Factors of their outputs.
    """

    in_scales: tuple[float, float]
    out_scales: tuple[float, float]

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The half without weights."""
        return AttentionHalf(f"model.layers.{number // 2}.", self, rotary, dtype, device)


class StateHalf:
    """The state space of a block behind its norm. The output is not added to the residual yet.

    Attributes:
        norm: The norm.
    """

    def __init__(self, prefix: str, settings: StateHalfSettings, dtype: torch.dtype, device: torch.device) -> None:
        size, eps = settings.hidden_size, settings.eps
        self.norm = RMSNorm(f"{prefix}input_layernorm", size, eps, dtype=dtype, device=device)
        self._mixer = settings.make_mixer(prefix, None, dtype, device)
        self._in_scale, self._out_scale = Scale(settings.in_scale, device), Scale(settings.out_scale, device)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of both parts."""
        return collect_slots([self.norm, self._mixer])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """None: there are no keys and values to scale."""
        return {}

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The state space's output, and the residual before it."""
        normed, residual = self.norm.add(hidden, residual)
        mixed = self._mixer(self._in_scale(normed), step)
        return self._out_scale(mixed), residual


class AttentionHalf(LlamaLayer):
    """Attention over the same input as the state space before it, whose output it adds too, and the feed-forward."""

    def __init__(
        self,
        prefix: str,
        settings: AttentionHalfSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(prefix, settings, rotary, dtype, device)
        self._in_scales, self._out_scales = (
            [Scale(factor, device) for factor in factors] for factors in (settings.in_scales, settings.out_scales)
        )

    def share_norm(self, half: StateHalf) -> None:
        """Normalises its input as the first half of the block does."""
        self._mixer_norm = half.norm

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The feed-forward's output, and the residual that the next norm adds it to."""
        if residual is None:
            raise ValueError("attention comes behind the state space of its block")
        normed = self._in_scales[0](self._mixer_norm(residual))
        attended = self._out_scales[0](self._mixer(normed, step))
        _, residual = self._mixer_norm.add(hidden, residual)  # the sum alone; captured steps have no other one
        normed, residual = self._mlp_norm.add(attended, residual)
        return self._out_scales[1](self._feed_forward(self._in_scales[1](normed))), residual


class FalconH1(Bamba):
    """`FalconH1ForCausalLM`; its tensors are named as Bamba's."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        for first, second in zip(self._layers[::2], self._layers[1::2], strict=True):
            if isinstance(first, StateHalf) and isinstance(second, AttentionHalf):
                second.share_norm(first)

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        has_bias, has_mlp_bias = read_bool(config, "attention_bias", False), read_bool(config, "mlp_bias", False)
        key, attention_in, attention_out, ssm_in, ssm_out, embedding, head = (
            read_factor(config, f"{name}_multiplier")
            for name in ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
        )
        gate, down = _read_factors(config, "mlp_multipliers", 2)
        if has_mlp_bias and gate != 1:
            raise ValueError("config.json: mlp_bias with a multiplier of the gate is not supported.")
        settings = read_llama(
            {**config, "rms_norm_eps": read_float(config, "rms_norm_eps", 1e-5)},
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_mlp_bias=has_mlp_bias,
        )
        halves: list[LlamaLayerSettings] = []
        for layer in settings.layers:
            halves.append(
                mix_layer(StateHalfSettings, layer, mixer=_read_mixer(config), in_scale=ssm_in, out_scale=ssm_out)
            )
            # The gate's factor is that of all inputs here, and that of ups is taken from the output again.
            attention = mix_layer(
                AttentionHalfSettings,
                layer,
                in_scales=(attention_in, gate),
                out_scales=(attention_out, down / gate),
            )
            halves.append(replace(attention, scale=key * layer.head_dim**-0.5))
        return replace(settings, layers=halves, embedding_scale=embedding, logit_scale=head)


def _read_mixer(config: Mapping[str, Any]) -> StateSpaceSettings:
    inner_size = read_int(config, "mamba_d_ssm", 1024) if config.get("mamba_d_ssm", 1024) is not None else None
    has_norm, is_before = read_bool(config, "mamba_rms_norm", False), read_bool(config, "mamba_norm_before_gate", True)
    return replace(
        read_state_space(config, inner_size),
        has_out_bias=read_bool(config, "projectors_bias", False),
        norm="none" if not has_norm else "before_gate" if is_before else "behind_gate",
        scales=tuple(_read_factors(config, "ssm_multipliers", 5)),
    )


def _read_factors(config: Mapping[str, Any], name: str, count: int) -> list[float]:
    factors = config.get(name)
    if factors is None:
        return [1.0] * count
    if not isinstance(factors, list | tuple) or len(factors) != count:
        raise ValueError(f"config.json: {name} must be {count} numbers, got {str(factors)[:64]}.")
    return [read_factor({name: factor}, name) for factor in factors]
