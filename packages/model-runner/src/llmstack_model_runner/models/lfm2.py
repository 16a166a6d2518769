"""LFM2: gated short convolutions beside attention; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.layers.short_convolution import ShortConvolutionSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int
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
_NAMES: Mapping[str, str] = {"model.embedding_norm.weight": "model.norm.weight"}


class Lfm2(HybridModel):
    """`Lfm2ForCausalLM`: the dense models of LFM2 and LFM2.5."""

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
        for part, ours in _LAYER_NAMES.items():
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
