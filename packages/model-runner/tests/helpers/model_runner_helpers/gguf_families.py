"""Families whose GGUF files are read, each tiny, and what llama.cpp's converter does with their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from model_runner_helpers.gguf_checkpoints import Converted, Family
from model_runner_helpers.gguf_models import gguf

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.2,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    "num_key_value_heads": 4, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64, "kv_lora_rank": 32,
    "q_lora_rank": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
SOFTMAX, SIGMOID = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID


def routed(writer: Any, config: Any) -> None:
    """The keys of DeepSeek's experts and of what is called like them."""
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def latent(writer: Any, config: Any) -> None:
    """As of a model with one head of keys, whose values are a part of them."""
    routed(writer, config)
    rank, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotary)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(rank)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(rotary)
    if scale := (getattr(config, "rope_parameters", None) or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def latent_sigmoid(writer: Any, config: Any) -> None:
    latent(writer, config)
    writer.add_expert_gating_func(SIGMOID)
    writer.add_expert_weights_norm(True)


def latent_softmax(writer: Any, config: Any) -> None:
    latent(writer, config)
    writer.add_expert_gating_func(SOFTMAX)


def without_products(writer: Any, config: Any) -> None:
    """As files were before the products of keys and values were two tensors."""
    latent_sigmoid(writer, config)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)
    for key in ("key_length_mla", "value_length_mla"):
        del writer.kv_data[0][f"deepseek2.attention.{key}"]


def of_deepseek(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    """The products of keys and of values of each head as two tensors, the first turned round."""
    if not name.endswith("kv_b_proj.weight"):
        yield corrected(name), tensor
        return
    products = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
    keys, values = products.split([config.qk_nope_head_dim, config.v_head_dim], 1)
    yield name.replace("kv_b", "k_b"), keys.transpose(1, 2).contiguous()
    yield name.replace("kv_b", "v_b"), values.contiguous()


def of_old_deepseek(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    yield corrected(name), tensor


def corrected(name: str) -> str:
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


def glm_4(writer: Any, config: Any) -> None:
    routed(writer, config)
    writer.add_rope_dimension_count(config.head_dim // 2)
    writer.add_expert_gating_func(SIGMOID)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def qwen_3_next(writer: Any, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_count(config.head_dim // 4)


def of_qwen_3_next(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    """Queries, keys and values of all heads, and gates apart, instead of all of each key head."""
    if "in_proj_qkvz" not in name:
        yield from of_old_qwen_3_next(name, tensor, config)
        return
    size, values = config.linear_key_head_dim, config.linear_value_head_dim
    values *= config.linear_num_value_heads // config.linear_num_key_heads
    parts = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1]).split([size, size, values, values], 1)
    *mixed, gates = (part.flatten(0, 1) for part in parts)
    number = name.split(".")[2]
    yield f"blk.{number}.attn_qkv.weight", torch.cat(mixed)
    yield f"blk.{number}.attn_gate.weight", gates.contiguous()


def of_old_qwen_3_next(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("shared_expert_gate.weight"):
        tensor = tensor.flatten()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    yield name, tensor


def gemma_4(writer: Any, config: Any) -> None:
    """Heads of two sizes, of which the common keys name the larger one; widths of layers where they differ."""
    have_windows = [kind == "sliding_attention" for kind in config.layer_types]
    size, shared = GEMMA_4["global_head_dim"], config.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(have_windows)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(GEMMA_4["head_dim"])
    writer.add_value_length_swa(GEMMA_4["head_dim"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(GEMMA_4["head_dim"])
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.attention_k_eq_v:
        without = GEMMA_4["num_global_key_value_heads"]
        writer.add_head_count_kv([GEMMA_4["num_key_value_heads"] if has else without for has in have_windows])
    if config.use_double_wide_mlp:
        first = config.num_hidden_layers - shared
        width = config.intermediate_size
        writer.add_feed_forward_length([width * (1 + (n >= first)) for n in range(config.num_hidden_layers)])
    if config.enable_moe_block:
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def of_gemma_4(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    if (place := next((place for part, place in own.items() if name.endswith(part)), None)) is not None:
        yield f"blk.{name.split('.')[2]}.{place}", tensor
    else:
        yield name + ".weight" * (not name.endswith(".weight")), tensor


def gemma_4_factors(config: Any) -> dict[str, torch.Tensor]:
    """Of the frequencies of layers without a window: those that are not used are divided by a huge number."""
    size = GEMMA_4["global_head_dim"]
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    num_used = int(size * share / 2)
    return {"rope_freqs.weight": torch.tensor([1.0] * num_used + [1e30] * (size // 2 - num_used))}


def selective(writer: Any, config: Any) -> None:
    prefix = "mamba_d_" if config.model_type == "jamba" else ""
    writer.add_ssm_conv_kernel(getattr(config, f"{prefix}conv" if prefix else "conv_kernel"))
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_state_size(getattr(config, f"{prefix}state" if prefix else "state_size"))
    writer.add_ssm_time_step_rank(config.mamba_dt_rank if prefix else config.time_step_rank)
    if config.model_type == "jamba":
        has = [n >= config.attn_layer_offset and (n - config.attn_layer_offset) % config.attn_layer_period == 0
               for n in range(config.num_hidden_layers)]  # fmt: skip
        writer.add_head_count_kv([config.num_key_value_heads * one for one in has])
        return
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def of_mamba(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    """Experts that stand alone are the feed-forward of a layer."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif "conv1d.weight" in name:
        tensor = tensor.squeeze()
    yield name.replace(".feed_forward.experts.", ".mlp.experts."), tensor


def kimi_linear(writer: Any, config: Any) -> None:
    latent_sigmoid(writer, config)
    has_latents = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([int(has) for has in has_latents])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)


def of_kimi_linear(name: str, tensor: torch.Tensor, config: Any) -> Converted:
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif "_conv1d.weight" in name:
        tensor = tensor.reshape(1, tensor.shape[0], 1, -1)
    # transformers saves layers without experts under this name too.
    yield from of_deepseek(re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name), tensor, config)


MAMBA: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16, "time_step_rank": 32,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
JAMBA = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "mamba_d_state": 16, "mamba_dt_rank": 32, "expert_layer_period": 2, "expert_layer_offset": 0,
    "initializer_range": 0.1,
}  # fmt: skip
KIMI = {name: value for name, value in LATENT.items() if name != "n_routed_experts"} | {
    "num_local_experts": 8, "q_lora_rank": None, "linear_head_dim": 32, "linear_num_heads": 4, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "initializer_range": 0.1,
}  # fmt: skip
GEMMA_4 = SIZES | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5,
    "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "initializer_range": 0.1,
}  # fmt: skip
GEMMA_4_SMALL = GEMMA_4 | {
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA_4_MIXED = GEMMA_4 | {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
QWEN_3_NEXT = SIZES | EXPERTS | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64, "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "qwen 3 next": Family("qwen3next", "Qwen3Next", QWEN_3_NEXT, qwen_3_next, of_qwen_3_next),
    "qwen 3 next of old": Family("qwen3next", "Qwen3Next", QWEN_3_NEXT, qwen_3_next, of_old_qwen_3_next),
    "gemma 4": Family("gemma4", "Gemma4Text", GEMMA_4, gemma_4, of_gemma_4, gemma_4_factors),
    "gemma 4 with vectors of tokens": Family(
        "gemma4", "Gemma4Text", GEMMA_4_SMALL, gemma_4, of_gemma_4, gemma_4_factors),
    "gemma 4 with experts": Family("gemma4", "Gemma4Text", GEMMA_4_MIXED, gemma_4, of_gemma_4, gemma_4_factors),
    "deepseek v3": Family(
        "deepseek2", "DeepseekV3", LATENT | {"rope_parameters": YARN, "n_group": 4, "topk_group": 2}, latent_sigmoid,
        of_deepseek),
    "deepseek v3 of old": Family(
        "deepseek2", "DeepseekV3", LATENT | {"n_group": 1, "topk_group": 1}, without_products, of_old_deepseek),
    "deepseek v2 lite": Family(
        "deepseek2", "DeepseekV2", LATENT | {
            "q_lora_rank": None, "num_hidden_layers": 27, "initializer_range": 0.1, "n_group": 1, "topk_group": 1,
                                             "norm_topk_prob": False}, latent_softmax, of_deepseek),
    "glm 4.7 flash": Family("deepseek2", "Glm4MoeLite", LATENT | {"n_group": 1, "topk_group": 1}, latent_sigmoid,
                            of_deepseek),
    "kimi linear": Family("kimi-linear", "KimiLinear", KIMI, kimi_linear, of_kimi_linear),
    "mamba": Family("mamba", "Mamba", MAMBA, selective, of_mamba),
    "falcon mamba": Family("mamba", "FalconMamba", MAMBA, selective, of_mamba),
    "jamba": Family("jamba", "Jamba", JAMBA, selective, of_mamba),
    "glm 4.5": Family(
        "glm4moe", "Glm4Moe", SIZES | {name: LATENT[name] for name in (
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
            "first_k_dense_replace")} | {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1,
                                         "routed_scaling_factor": 1.5}, glm_4, of_old_deepseek),
}  # fmt: skip
"""By a name for tests. Files of old times are of the same models."""
