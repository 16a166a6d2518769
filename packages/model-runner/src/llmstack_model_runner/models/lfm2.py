"""LFM2 and LFM3: gated short convolutions beside attention, also with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.layers.short_convolution import ShortConvolutionSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.mixture_of_experts import read_expert_numbers
from llmstack_model_runner.models.state_layer import HybridModel, mix_layers, read_layer_kinds

_LAYER_NAMES: Mapping[str, str] = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_EXPERT_NAMES: Mapping[str, str] = {
    "expert_bias": "gate.e_score_correction_bias",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
_LFM3_NAMES: Mapping[str, str] = {
    "operator_norm": "input_layernorm",
    "post_operator_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
    "self_attn.gate_proj": "self_attn.g_proj",  # of the hub
    **{name: ours for name, ours in _LAYER_NAMES.items() if name.startswith("feed_forward.")},
}
# Rotary embeddings where a configuration has none.
_LFM3_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_NAMES: Mapping[str, str] = {"model.embedding_norm.weight": "model.norm.weight"}


class Lfm2(HybridModel):
    """`Lfm2ForCausalLM`: the dense models of LFM2 and LFM2.5."""

    _layer_names: ClassVar[Mapping[str, str]] = _LAYER_NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        is_tied = read_bool(config, "tie_word_embeddings", True)
        settings = read_llama(
            {
                **config,
                "intermediate_size": _intermediate_size(config),
                "rms_norm_eps": read_float(config, "norm_eps", 1e-5),
                "tie_word_embeddings": read_bool(config, "tie_embedding", is_tied),
                "hidden_act": "silu",
            },
            has_qk_norm=True,
        )
        length, has_bias = read_int(config, "conv_L_cache", 3), read_bool(config, "conv_bias", False)
        if length < 2:
            raise ValueError(f"config.json: conv_L_cache must be at least 2, got {length}.")
        convolution = ShortConvolutionSettings(settings.hidden_size, length, has_bias)
        kinds = _have_attention(config, len(settings.layers))
        return replace(settings, layers=mix_layers(settings.layers, convolution, kinds))

    def rename(self, name: str) -> str:
        """The name that the Llama family has for a tensor."""
        for part, ours in self._layer_names.items():
            if name.endswith(f".{part}.weight"):
                return f"{name.removesuffix(f'{part}.weight')}{ours}.weight"
        return _NAMES.get(name, name)


class Lfm2Moe(Lfm2):
    """`Lfm2MoeForCausalLM`: experts in all but the first layers, chosen by corrected sigmoids."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = super().read_settings({**config, "block_auto_adjust_ff_dim": False})
        experts = ExpertSettings(
            *read_expert_numbers(config, 32, 4),
            inner_size=read_int(config, "moe_intermediate_size", 1792),
            is_normalised=False,
            routing=GroupedRouting(
                scaling=read_float(config, "routed_scaling_factor", 1.0),
                is_corrected=read_bool(config, "use_expert_bias", True),
                is_normalised=read_bool(config, "norm_topk_prob", True),
                is_sigmoid=True,
                least_sum=1e-6,
            ),
        )
        num_dense = read_int(config, "num_dense_layers", 2, least=0)
        dense, others = settings.layers[:num_dense], settings.layers[num_dense:]
        return replace(settings, layers=[*dense, *(replace(layer, experts=experts) for layer in others)])

    def rename(self, name: str) -> str:
        """The experts and their router as Qwen's are named."""
        layer, part, rest = name.partition(".feed_forward.")
        if part and (rest.startswith(("gate.", "experts.")) or rest == "expert_bias"):
            for suffix, ours in _EXPERT_NAMES.items():
                rest = f"{rest.removesuffix(suffix)}{ours}" if rest.endswith(suffix) else rest
            return f"{layer}.mlp.{rest}"
        return super().rename(name)


class Lfm3(Lfm2):
    """`Lfm3ForCausalLM`: windows in some layers with attention, gates per head, and norms of outputs too."""

    _layer_names = _LFM3_NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "use_sandwich_norm", True)
        has_bias, num_layers = read_bool(config, "attention_bias", False), read_int(config, "num_hidden_layers")
        kinds = _lfm3_kinds(config, num_layers)
        ropes = config.get("rope_parameters") or _LFM3_ROPES
        settings = read_llama(
            {
                **config,
                "layer_types": kinds,
                "head_dim": read_int(config, "head_dim", 128),
                "rms_norm_eps": read_float(config, "norm_eps", read_float(config, "rms_norm_eps", 1e-5)),
                "tie_word_embeddings": read_bool(config, "tie_word_embeddings", True),
                "hidden_act": "silu",
                "rope_parameters": None,
                "rope_scaling": None,
            },
            read_int(config, "sliding_window", 256),
            has_qk_norm=True,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_post_norms=True,
            has_head_gates=read_bool(config, "use_attention_gate", True),
        )
        head_dim, num_positions = settings.layers[0].head_dim, settings.max_model_len
        layers = [
            layer if kind == "conv"
            else replace(layer, rope=parse_rope({"rope_parameters": ropes[kind]}, head_dim, num_positions))
            for kind, layer in zip(kinds, settings.layers, strict=True)
        ]  # fmt: skip
        length, has_bias = read_int(config, "conv_L_cache", 7, least=2), read_bool(config, "conv_bias", False)
        convolution = ShortConvolutionSettings(settings.hidden_size, length, has_bias)
        return replace(settings, layers=mix_layers(layers, convolution, [kind != "conv" for kind in kinds]))


def _lfm3_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """The kind of each layer; by default two of four have attention, one of them with a window."""
    kinds = config.get("layer_types")
    if kinds is None:
        places = {0: "sliding_attention", 2: "full_attention"}
        return ["conv", *(places.get(number % 4, "conv") for number in range(1, num_layers))]
    read_layer_kinds(kinds, num_layers, "conv", "sliding_attention")
    return [str(kind) for kind in kinds]


def _intermediate_size(config: Mapping[str, Any]) -> int:
    """Width of the feed-forward, which a configuration may give before two thirds of it are taken and rounded up."""
    size = read_int(config, "block_ff_dim", read_int(config, "intermediate_size", 12288))
    if not read_bool(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(read_float(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = read_int(config, "block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _have_attention(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have attention, by `layer_types`, or by the list of their numbers in older configurations."""
    kinds = config.get("layer_types")
    if kinds is None:
        numbers = config.get("full_attn_idxs")
        numbers = range(num_layers) if numbers is None else numbers
        kinds = ["full_attention" if number in numbers else "conv" for number in range(num_layers)]
    return read_layer_kinds(kinds, num_layers, "conv")
