"""OLMo Hybrid: gated delta nets, and attention whose output is normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import RMSNorm, RotaryEmbedding, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.delta_net import DeltaNetSettings
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayerSettings, make_feed_forward
from llmstack_model_runner.models.state_layer import SplitConvolutions, mix_layer, mix_layers, read_layer_kinds

_NORM_EPS = 1e-5  # of the answers of delta nets, whatever the configuration says of others
# Names of the hub; transformers 5 has ours.
_NAMES: Mapping[str, str] = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


class OlmoAttentionSettings(LlamaLayerSettings):
    """Sizes of a layer with attention."""

    __slots__ = ()

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The layer of this number, without weights."""
        return OlmoAttentionLayer(f"model.layers.{number}.", self, rotary, dtype, device)


class OlmoAttentionLayer:
    """Attention and feed-forward, each of which takes the residual as it is and is normalised behind it."""

    def __init__(
        self,
        prefix: str,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = settings.hidden_size
        self._mixer = settings.make_mixer(prefix, rotary, dtype, device)
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)
        self._mixer_norm, self._mlp_norm = (
            settings.norm(f"{prefix}post_{part}_layernorm", size, dtype, device)
            for part in ("attention", "feedforward")
        )
        self._sum = RMSNorm("", size, settings.eps, dtype=dtype, device=device, has_scale=False)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        return collect_slots([self._mixer, self._mixer_norm, self._feed_forward, self._mlp_norm])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values."""
        return self._mixer.optional_slots()

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The normalised output of the feed-forward, and the residual that the next layer adds it to."""
        _, residual = self._sum.add(hidden, residual)  # the sum alone; captured steps have no other one
        mixed = self._mixer_norm(self._mixer(residual, step))
        _, residual = self._sum.add(mixed, residual)
        return self._mlp_norm(self._feed_forward(residual)), residual


class OlmoHybrid(SplitConvolutions):
    """`OlmoHybridForCausalLM`: layers with attention have the norms of OLMo 2, the others those of Llama."""

    renamed: ClassVar[Mapping[str, str]] = _NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "hidden_act", "silu")
        has_bias, num_positions = read_bool(config, "attention_bias", False), {"max_position_embeddings": 65536}
        own = {name: value for name, value in config.items() if value is not None and name != "head_dim"}
        settings = read_llama(
            num_positions | own, has_qkv_bias=has_bias, has_attention_out_bias=has_bias, has_whole_qk_norm=True
        )
        layers = [mix_layer(OlmoAttentionSettings, layer) for layer in settings.layers]
        if not _has_rope(config):
            layers = [replace(layer, rope=None) for layer in layers]
        kinds = read_layer_kinds(_layer_types(config, len(layers)), len(layers), "linear_attention")
        return replace(settings, layers=mix_layers([*layers], _read_delta_net(config), kinds))


def _has_rope(config: Mapping[str, Any]) -> bool:
    """Whether attention knows positions; published checkpoints have no base of its angles, and it does not."""
    rope = config.get("rope_parameters")
    fields = rope if isinstance(rope, Mapping) and "rope_theta" in rope else config
    return fields.get("rope_theta", 0) is not None


def _layer_types(config: Mapping[str, Any], num_layers: int) -> object:
    kinds = config.get("layer_types")
    if kinds is not None:
        return kinds
    found = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(num_layers)]
    return found if num_layers > 3 else [*found[:-1], "full_attention"]


def _read_delta_net(config: Mapping[str, Any]) -> DeltaNetSettings:
    num_heads = read_int(config, "num_attention_heads")
    num_key_heads = read_int(config, "linear_num_key_heads", num_heads)
    key_dim = read_int(config, "linear_key_head_dim", 3 * read_int(config, "hidden_size") // (4 * num_key_heads))
    settings = DeltaNetSettings(
        num_key_heads=num_key_heads,
        num_heads=read_int(config, "linear_num_value_heads", num_heads),
        key_dim=key_dim,
        value_dim=read_int(config, "linear_value_head_dim", 2 * key_dim),
        length=read_int(config, "linear_conv_kernel_dim", 4),
        is_split=True,
        rate_scale=2.0 if read_bool(config, "linear_allow_neg_eigval", True) else 1.0,
        norm_eps=_NORM_EPS,
    )
    return settings.check()
