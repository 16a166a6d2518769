"""Families of the Llama kind whose GGUF files are read, and what llama.cpp's converter does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from model_runner_helpers.gguf_checkpoints import Converted, Family
from model_runner_helpers.gguf_models import gguf

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HEADS = SIZES | {"head_dim": 32}
SIGMOID = gguf.ExpertGatingFuncType.SIGMOID


def rotated(share: float = 1.0) -> Callable[[Any, Any], None]:
    """Writes how many numbers of each head are rotated."""

    def write(writer: Any, config: Any) -> None:
        writer.add_rope_dimension_count(int(head_dim_of(config) * share))

    return write


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def granite(writer: Any, config: Any) -> None:
    rotated()(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def permuted(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    """Queries and keys in the order of pairs that are rotated together."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            size = len(tensor) // heads
            tensor = tensor.reshape(heads, 2, size // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def cohere(writer: Any, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere_2(writer: Any, config: Any) -> None:
    cohere(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(head_dim_of(config))


def windows(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "olmo3":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])


def minimax_m2(writer: Any, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(SIGMOID)
    writer.add_rope_dimension_count(16)


def corrected(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def ernie(writer: Any, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.moe_num_shared_experts)


def of_ernie(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    yield from corrected(name, tensor.flatten() if "correction" in name else tensor, config)


def hunyuan(writer: Any, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_used_count(config.moe_topk)
    writer.add_expert_shared_count(1)


def qwen_2(writer: Any, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def of_qwen_2(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    yield name, tensor.flatten() if name.endswith("shared_expert_gate.weight") else tensor


def hy_v3(writer: Any, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.router_scaling_factor)
    writer.add_expert_gating_func(SIGMOID)


def of_hy_v3(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    name = name.replace("mlp.router.gate.", "mlp.gate.").replace("mlp.shared_mlp.", "mlp.shared_experts.")
    # The only tensor of a family with experts whose name says neither weight nor bias.
    yield (f"blk.{name.split('.')[2]}.exp_probs_b" if name.endswith("expert_bias") else name), tensor


def mistral_3(writer: Any, config: Any) -> None:
    rotated()(writer, config)
    rope = config.rope_parameters
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def gemma_3n(writer: Any, config: Any) -> None:
    windows(writer, config)
    writer.add_feed_forward_length(config.intermediate_size[0])
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())


def of_gemma_3n(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    """The projections of further residuals are one tensor each way, as the experts of other families are."""
    for part in ("altup_projections", "altup_unembed_projections"):
        if f".{part}." in name:
            yield f"model.{part}.experts.{name.split('.')[2]}.all.weight", tensor
            return
    yield (name if name.endswith(".weight") else f"{name}.weight"), tensor


def unused_keys(config: Any) -> dict[str, torch.Tensor]:
    """Published checkpoints have keys and values of layers that read those of others, and so have files."""
    first, size = config.num_hidden_layers - config.num_kv_shared_layers, config.num_key_value_heads * config.head_dim
    shapes = {
        "attn_k": (size, config.hidden_size),
        "attn_v": (size, config.hidden_size),
        "attn_k_norm": (config.head_dim,),
    }
    numbers = range(first, config.num_hidden_layers)
    return {f"blk.{n}.{part}.weight": torch.randn(shape) for n in numbers for part, shape in shapes.items()}


DECODERS: Mapping[str, Family] = {
    "ernie 4.5": Family("ernie4_5", "Ernie4_5", HEADS | {"use_bias": False}),
    "ernie 4.5 with experts": Family("ernie4_5-moe", "Ernie4_5_Moe", SIZES | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1}, ernie, of_ernie),
    "hunyuan": Family("hunyuan-dense", "HunYuanDenseV1", HEADS),
    "hunyuan with experts": Family(
        "hunyuan-moe", "HunYuanMoEV1", HEADS | {"num_experts": 4, "moe_topk": 2}, hunyuan),
    "minimax m2": Family("minimax-m2", "MiniMaxM2", HEADS | {
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        minimax_m2, corrected),
    "granite": Family("granite", "Granite", SIZES | {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        granite, permuted),
    "glm 4": Family("glm4", "Glm4", HEADS | {
        "attention_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, rotated(0.5)),
    "command r": Family("command-r", "Cohere", SIZES | {"tie_word_embeddings": True}, cohere),
    "cohere 2": Family("cohere2", "Cohere2", SIZES | {"sliding_window": 5, "tie_word_embeddings": True}, cohere_2),
    "seed oss": Family("seed_oss", "SeedOss", HEADS),
    "smollm 3": Family("smollm3", "SmolLM3", SIZES, rotated(), permuted),
    "olmo 2": Family("olmo2", "Olmo2", SIZES),
    "olmo 3": Family("olmo2", "Olmo3", SIZES | {"sliding_window": 5}, windows),
    "exaone 4": Family("exaone4", "Exaone4", SIZES | {"sliding_window": 5, "num_hidden_layers": 64}, windows),
    "hy3": Family("hy_v3", "HYV3", HEADS | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2,
        "router_scaling_factor": 1.5}, hy_v3, of_hy_v3, table="step35"),
    "olmoe": Family("olmoe", "Olmoe", SIZES | {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "ministral 3": Family("mistral3", "Ministral3", HEADS | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 8,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        mistral_3, permuted),
    # llama.cpp has some numbers of the published models fixed, and another deviation of few numbers.
    "gemma 3n": Family("gemma3n", "Gemma3nText", HEADS | {
        "tie_word_embeddings": True, "num_hidden_layers": 24, "sliding_window": 5, "initializer_range": 0.02,
        "intermediate_size": 1024,
        "layer_types": [*[*["sliding_attention"] * 4, "full_attention"] * 4, *["sliding_attention"] * 4],
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 300,
        "laurel_rank": 64, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 14},
        gemma_3n, of_gemma_3n, unused_keys),
    "qwen 2 with experts": Family("qwen2moe", "Qwen2Moe", SIZES | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64}, qwen_2, of_qwen_2),
}  # fmt: skip
