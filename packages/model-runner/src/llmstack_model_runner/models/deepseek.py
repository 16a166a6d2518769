"""DeepSeek V2, V3, Mistral 4: latent attention, experts beside shared ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmstack_model_files import extended_positions
from llmstack_model_runner.layers import RotaryEmbedding
from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.layers.latent_attention import LatentAttention, LatentSettings, QueryGrowth
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.rotary import RopeParameters, parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.kv_spec import LayerKVSpec, one_latent
from llmstack_model_runner.models.layers_behind import LayersBehind
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekLayerSettings(LlamaLayerSettings):
    """Sizes of one block.

    Attributes:
        latent: Those of its attention.
    """

    latent: LatentSettings

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        indexer = self.latent.indexer
        return one_latent(self.latent.width, 0 if indexer is None or indexer.is_shared else indexer.head_dim)

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """Its attention, without weights."""
        return LatentAttention(f"{prefix}self_attn.", self.hidden_size, self.latent, rotary, dtype, device)


class DeepseekV2(LayersBehind):
    """`DeepseekV2ForCausalLM`: experts by the softmax of their scores."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "scoring_func", "softmax")
        refuse(config, "norm_topk_prob", False)
        refuse(config, "topk_method", "greedy", "group_limited_greedy")
        is_limited = config.get("topk_method") == "group_limited_greedy"
        routing = GroupedRouting(
            num_groups=read_int(config, "n_group") if is_limited else 1,
            num_group_choices=read_int(config, "topk_group") if is_limited else 1,
            scaling=read_float(config, "routed_scaling_factor", 1.0),
        )
        return read_deepseek(config, routing)


class DeepseekV3(DeepseekV2):
    """`DeepseekV3ForCausalLM`, also of Kimi K2 and GigaChat: experts by corrected sigmoids of their scores."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "scoring_func", "sigmoid")
        refuse(config, "topk_method", "noaux_tc")
        routing = read_routing(config, num_groups=8, num_group_choices=4, scaling=2.5)
        return read_deepseek({"first_k_dense_replace": 3, "n_shared_experts": 1, **config}, routing)


class Mistral4(StackedExpertWeights, DeepseekV2):
    """`Mistral4ForCausalLM`, also of Mistral Large 3: experts by normalised shares of a softmax, queries that grow."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "n_group", 1, None)
        routing = GroupedRouting(
            scaling=read_float(config, "routed_scaling_factor", 1.0),
            is_normalised=read_bool(config, "norm_topk_prob", True),
        )
        rope = dict(config.get("rope_parameters") or {})
        # Says again which part of a head is rotated.
        given = [rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")]
        plain_dim, rotary_dim = read_int(config, "qk_nope_head_dim"), read_int(config, "qk_rope_head_dim")
        if any(share is not None and share * (plain_dim + rotary_dim) != rotary_dim for share in given):
            raise ValueError("config.json: partial_rotary_factor and qk_rope_head_dim contradict each other.")
        return read_deepseek({**config, "rope_parameters": rope, "partial_rotary_factor": None}, routing)


def read_deepseek(config: Mapping[str, Any], routing: GroupedRouting) -> Settings:
    """The fields that configurations of V2 and V3 share."""
    refuse(config, "pretraining_tp", 1)
    refuse(config, "moe_layer_freq", 1)
    refuse(config, "index_topk")  # an indexer of sparse attention, as V3.2 has
    hidden_size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    max_model_len = read_int(config, "max_position_embeddings", 2048)
    latent, rope = _read_latent(config, num_heads, max_model_len)
    num_layers = read_int(config, "num_hidden_layers")
    num_dense = config.get("first_k_dense_replace") or 0
    experts = read_routed_experts(config, routing)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": read_int(config, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_dim": latent.width,
        "eps": read_float(config, "rms_norm_eps", 1e-6),
        "rope": rope,
        "activation": str(config.get("hidden_act") or "silu"),
        "has_mlp_bias": read_bool(config, "mlp_bias", False),
        "latent": latent,
    }
    dense = DeepseekLayerSettings(**fields)
    mixed = replace(dense, experts=experts)
    return Settings(
        hidden_size=hidden_size,
        vocab_size=read_int(config, "vocab_size"),
        max_model_len=extended_positions(config, max_model_len),
        is_tied=read_bool(config, "tie_word_embeddings", False),
        layers=[dense if number < num_dense else mixed for number in range(num_layers)],
    )


def read_mixed(config: Mapping[str, Any], num_dense: int) -> Settings:
    """Layers with latent attention; which have experts is said by their kinds, or by the number of those before."""
    routing = read_routing(config, num_groups=None, num_group_choices=None)
    num_layers = read_int(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        first = read_int(config, "first_k_dense_replace", num_dense, least=0)
        kinds = ["dense" if number < first else "sparse" for number in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {"dense", "sparse"}:
        raise ValueError("config.json: mlp_layer_types must name each layer dense or sparse.")
    settings = read_deepseek({"n_shared_experts": 1, **config, "first_k_dense_replace": 0}, routing)
    layers = [
        layer if kind == "sparse" else replace(layer, experts=None)
        for kind, layer in zip(kinds, settings.layers, strict=True)
    ]
    return replace(settings, layers=layers)


def _read_latent(
    config: Mapping[str, Any], num_heads: int, max_model_len: int
) -> tuple[LatentSettings, RopeParameters]:
    plain_dim, rotary_dim = read_int(config, "qk_nope_head_dim", 128), read_int(config, "qk_rope_head_dim", 64)
    rope = parse_rope(config, rotary_dim, max_model_len)
    scale = (plain_dim + rotary_dim) ** -0.5
    mscale, factor = rope.values.get("mscale_all_dim", 0.0), rope.values.get("factor", 1.0)
    if rope.kind != "default" and mscale and factor > 1:  # YaRN's, of queries and keys
        scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2
    query_rank = config.get("q_lora_rank", 1536)
    beta, original = (rope.values.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    latent = LatentSettings(
        num_heads=num_heads,
        query_rank=None if query_rank is None else read_int(config, "q_lora_rank", 1536),
        rank=read_int(config, "kv_lora_rank", 512),
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=read_int(config, "v_head_dim", 128),
        scale=scale,
        has_bias=read_bool(config, "attention_bias", False),
        is_interleaved=read_bool(config, "rope_interleave", True),
        growth=QueryGrowth(beta, int(original)) if beta and original else None,
    )
    return latent, rope


def read_routing(
    config: Mapping[str, Any], num_groups: int | None = 1, num_group_choices: int | None = 1, scaling: float = 1.0
) -> GroupedRouting:
    """Choices by corrected sigmoids, among groups of experts. A field whose default is None must be there."""
    return GroupedRouting(
        num_groups=read_int(config, "n_group", num_groups),
        num_group_choices=read_int(config, "topk_group", num_group_choices),
        scaling=read_float(config, "routed_scaling_factor", scaling),
        is_corrected=True,
        is_normalised=read_bool(config, "norm_topk_prob", True),
    )


def read_routed_experts(config: Mapping[str, Any], routing: GroupedRouting) -> ExpertSettings | None:
    """The routed experts; None where all layers are dense."""
    if config.get("n_routed_experts", 0) is None:
        return None
    num_experts = read_int(config, "n_routed_experts")
    num_choices = read_int(config, "num_experts_per_tok")
    routing.check(num_experts, num_choices)
    inner_size = read_int(config, "moe_intermediate_size")
    return ExpertSettings(
        num_experts,
        num_choices,
        inner_size,
        is_normalised=False,
        routing=routing,
        shared_size=inner_size * (config.get("n_shared_experts") or 0),
    )
