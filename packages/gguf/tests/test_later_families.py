"""Gemma 4, latent attention, Mamba-1 and further mixtures: configurations, names, and what is refused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from llmstack_gguf import GGUFError, Header, TensorInfo, TensorType, target_of
from llmstack_gguf.architecture import ROPE_FACTORS, model_config

F32 = TensorType("F32", 1, 4)
SIZES: dict[str, Any] = {
    "context_length": 128, "embedding_length": 32, "block_count": 3, "feed_forward_length": 64, "expert_count": 4,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_used_count": 2, "expert_feed_forward_length": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": 16, "attention.key_length": 24, "attention.value_length": 16, "rope.dimension_count": 8,
    "attention.key_length_mla": 20, "attention.value_length_mla": 12,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "attention.sliding_window_pattern": array("B", [1, 0, 0]), "attention.sliding_window": 5,
    "attention.key_length": 16, "attention.key_length_swa": 8, "rope.dimension_count_swa": 8,
    "attention.head_count_kv": array("i", [2, 1, 1]),
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "ssm.inner_size": 64, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.conv_kernel": 4,
    "attention.head_count_kv": array("i", [0, 2, 0]),
}  # fmt: skip
OWN = {"deepseek2": LATENT, "kimi-linear": LATENT | MAMBA | {"kda.head_dim": 8}, "gemma4": GEMMA, "jamba": MAMBA}
USED = [1.0, 1.0, *[1e30] * 6]


def header(architecture: str, shapes: dict[str, tuple[int, ...]], **changes: Any) -> Header:
    values = SIZES | OWN.get(architecture, {})
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    metadata = {f"{architecture}.{name}": value for name, value in values.items() if value is not None}
    tensors = {name: TensorInfo(shape, F32, 0, 0) for name, shape in shapes.items()}
    own: dict[str, Any] = {"general.architecture": architecture} | metadata
    return Header(own, {"token_embd.weight": TensorInfo((9, 32), F32, 0, 0)} | tensors)


def config(architecture: str, *names: str, factors: Sequence[float] = USED, **changes: Any) -> dict[str, Any]:
    return model_config(
        header(architecture, dict.fromkeys(names, (4, 32)), **changes),
        {ROPE_FACTORS: factors} if architecture == "gemma4" else {},
    )


def test_the_router_decides_the_class_of_latent_attention() -> None:
    assert config("deepseek2")["architectures"] == ["DeepseekV2ForCausalLM"]  # old files do not say it
    assert config("deepseek2", "blk.1.exp_probs_b.bias")["scoring_func"] == "sigmoid"
    softmax = config("deepseek2", "blk.1.exp_probs_b.bias", expert_gating_func=1, expert_group_count=2)
    assert (softmax["model_type"], softmax["topk_method"]) == ("deepseek_v2", "group_limited_greedy")
    assert config("deepseek2", expert_count=0)["n_routed_experts"] is None


def test_sizes_of_latents_are_those_of_either_generation() -> None:
    newer = config("deepseek2")
    assert (newer["qk_nope_head_dim"], newer["qk_rope_head_dim"], newer["v_head_dim"]) == (12, 8, 12)
    older = config("deepseek2", attention__key_length_mla=None, attention__value_length_mla=None)
    assert (older["qk_nope_head_dim"], older["v_head_dim"]) == (16, 16)


def test_products_of_keys_and_values_become_one_tensor() -> None:
    shapes = {"blk.0.attn_k_b.weight": (4, 16, 12), "blk.0.attn_v_b.weight": (4, 12, 16)}
    found = header("deepseek2", shapes)
    keys = target_of(found, "blk.0.attn_k_b.weight")
    assert (keys.names, keys.form) == (("model.layers.0.self_attn.kv_b_proj.weight",), "products")
    assert keys.partner == "blk.0.attn_v_b.weight"
    assert target_of(found, keys.partner).names == ()


@pytest.mark.parametrize("shape", [(4, 12), (3, 12, 16), (4, 12, 15), ()])
def test_products_that_do_not_belong_together_are_refused(shape: tuple[int, ...]) -> None:
    shapes = {"blk.0.attn_k_b.weight": (4, 16, 12)} | ({"blk.0.attn_v_b.weight": shape} if shape else {})
    with pytest.raises(GGUFError, match="are not products of the same heads and latents"):
        target_of(header("deepseek2", shapes), "blk.0.attn_k_b.weight")


def test_gates_and_ups_in_one_tensor_are_experts_in_turns() -> None:
    shapes = {"blk.0.ffn_gate_up_exps.weight": (2, 8, 32), "blk.1.ffn_gate_up_exps.weight": (2, 7, 32)}
    found = header("gemma4", shapes)
    assert target_of(found, "blk.0.ffn_gate_up_exps.weight").names == tuple(
        f"model.layers.0.experts.{number}.{part}_proj.weight" for number in (0, 1) for part in ("gate", "up")
    )
    with pytest.raises(GGUFError, match=r"the shape \[2, 7, 32\], which is not that of experts"):
        target_of(found, "blk.1.ffn_gate_up_exps.weight")


def test_layers_that_predict_several_tokens_are_left_out() -> None:
    found = header(
        "glm4moe", {"blk.2.attn_q.weight": (32, 32), "blk.1.attn_q.weight": (32, 32)}, nextn_predict_layers=1
    )
    assert target_of(found, "blk.2.attn_q.weight").names == ()
    assert target_of(found, "blk.1.attn_q.weight").names == ("model.layers.1.self_attn.q_proj.weight",)
    assert config("glm4moe", nextn_predict_layers=1)["num_hidden_layers"] == 2


def test_a_scale_that_no_architecture_has_is_refused() -> None:
    for name in ("blk.0.ffn_down.scale", "blk.0.ffn_down.input_scale"):
        with pytest.raises(GGUFError, match="scales a tensor in a way that is not supported"):
            target_of(header("llama", {name: (1,)}), name)
    own = target_of(header("gemma4", {"blk.0.ffn_gate_inp.scale": (32,)}), "blk.0.ffn_gate_inp.scale")
    assert own.names == ("model.layers.0.router.scale",)


def test_places_of_attention_and_of_experts_are_distances() -> None:
    found = config("jamba", "blk.0.ffn_gate_inp.weight", "blk.2.ffn_gate_inp.weight")
    assert (found["attn_layer_period"], found["attn_layer_offset"]) == (3, 1)
    assert (found["expert_layer_period"], found["expert_layer_offset"]) == (2, 0)
    assert config("jamba")["num_experts"] == 1


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("deepseek2", {"attention__temperature_scale": 0.1}, "scaled by their positions"),
        ("deepseek2", {"expert_gating_func": 3}, "the function 3 of its router"),
        ("deepseek2", {"attention__key_length_mla": 8}, "heads of 8 numbers have none beside the 8 with RoPE"),
        ("deepseek2", {"block_count": 1 << 40}, "4096 are the most"),
        ("deepseek2", {"nextn_predict_layers": 3}, "says 0 layers"),
        ("kimi-linear", {"expert_gating_func": 1}, "a router without sigmoids"),
        ("glm4moe", {"expert_gating_func": 1}, "a router without sigmoids"),
        ("minimax-m2", {"expert_gating_func": 1, "attention__head_count_kv": 2}, "a router without sigmoids"),
        ("hy_v3", {"expert_gating_func": 2, "expert_weights_norm": False}, "weights do not sum to 1"),
        ("hy_v3", {"expert_shared_feed_forward_length": 24}, "24 numbers are no multiple of 16"),
        ("mistral3", {"expert_count": 0}, "only files with YaRN and with a scale of attention"),
        ("hunyuan-moe", {"expert_feed_forward_length": 32}, "shared experts of another width"),
        ("cohere2", {"attention__key_length": 16, "attention__layer_norm_epsilon": 1e-5, "logit_scale": 1.0},
         "heads that are no parts of the hidden states"),
        ("jamba", {"attention__head_count_kv": array("i", [2, 2, 0])}, "'attn' are not the same distance apart"),
        ("jamba", {"attention__head_count_kv": array("i", [0, 0, 0])}, "no layer of the kind 'attn'"),
        ("jamba", {"ssm__inner_size": 63}, "63 inner features are no multiple of 32"),
        ("gemma4", {"attention__head_count_kv": array("i", [2, 1, 2])}, "of one kind have different numbers"),
        ("gemma4", {"feed_forward_length": array("i", [64, 32, 64])}, "of different widths"),
        ("gemma4", {"rope__scaling__type": "yarn"}, "a scaling of RoPE"),
        ("gemma4", {"rope__dimension_count_swa": 4}, "rotation of a part of each head"),
        ("gemma4", {"factors": [1.0] * 7}, "do not say which frequencies are used"),
        ("gemma4", {"factors": [1.0, 8.0, *[1e30] * 6]}, "do not say which frequencies are used"),
        ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "expert_count": 0,
                   "rope__scaling__original_context_length": 8, "rope__scaling__yarn_ext_factor": 0.5},
         "an extrapolation factor of YaRN"),
    ],
)  # fmt: skip
def test_what_makes_no_model_is_refused(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        config(architecture, **changes)


def test_windows_are_those_of_the_file_or_of_three_in_four_layers() -> None:
    three = ["sliding_attention"] * 3
    found = config("cohere2", attention__sliding_window=8, attention__layer_norm_epsilon=1e-5, logit_scale=0.5)
    assert (found["sliding_window"], found["layer_types"]) == (8, three)
    olmo = config("olmo2", attention__sliding_window=8, attention__sliding_window_pattern=array("B", [0, 1, 0]))
    assert (olmo["architectures"], olmo["layer_types"][:2]) == (["Olmo3ForCausalLM"], ["full_attention", three[0]])
    assert config("olmo2")["architectures"] == ["Olmo2ForCausalLM"]
    assert config("exaone4")["sliding_window"] is None


def test_fields_of_experts_have_the_names_of_their_family() -> None:
    ernie = config("ernie4_5-moe", expert_shared_count=2, leading_dense_block_count=1)
    assert (ernie["moe_num_experts"], ernie["moe_k"], ernie["moe_layer_start_index"]) == (4, 2, 1)
    minimax = config("minimax-m2", rope__dimension_count=4, expert_gating_func=2)
    assert (minimax["num_local_experts"], minimax["intermediate_size"]) == (4, 16)
    assert minimax["partial_rotary_factor"] == 0.5


def test_deviations_of_gemma_3n_are_shares_of_zeros() -> None:
    own = {"attention.shared_kv_layers": 1, "embedding_length_per_layer_input": 8, "altup.active_idx": 0,
           "altup.num_inputs": 4, "attention.sliding_window_pattern": array("B", [1, 1, 0]),
           "attention.sliding_window": 5, "attention.key_length": 8}  # fmt: skip
    scales = array("f", [1.6448536, float("-inf"), 0.0])
    changes = {name.replace(".", "__"): value for name, value in own.items()}
    tables = ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    found = config("gemma3n", *tables, activation_sparsity_scale=scales, **changes)
    assert found["activation_sparsity_pattern"] == pytest.approx([0.95, 0.0, 0.5], abs=1e-6)
    assert found["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    for wrong in (array("f", [0.0]), array("f", [float("nan")] * 3), None):
        with pytest.raises(GGUFError, match="scales of sparsity"):
            config("gemma3n", *tables, activation_sparsity_scale=wrong, **changes)
    several = header("gemma3n", {"altup_proj.weight": (3, 8, 8)})
    assert target_of(several, "altup_proj.weight").names[2] == "model.altup_projections.2.weight"
    with pytest.raises(GGUFError, match="not that of several matrices"):
        target_of(header("gemma3n", {"altup_proj.weight": (8, 8)}), "altup_proj.weight")


def test_bounds_of_yarn_are_read() -> None:
    changes = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_beta_fast": 16.0}
    found = config("llama", expert_count=0, rope__scaling__original_context_length=8, **changes)
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "beta_fast": 16.0}
    assert found["rope_scaling"] == expected
