"""State spaces of Mamba-2 as published: ranks, chunks, hits and adapters write the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from state_engine import KINDS
from state_tokens import (
    VOCAB_SIZE,
    check_adapter,
    check_captured_decodes,
    check_own_names,
    cuts,
    new_model,
    save_as_published,
    tokens_of,
    tokens_of_transformers,
)

from llmstack_kernels.testing import runs_native_kernels

SIZES: dict[str, Any] = {
    "torch_dtype": "float32", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_chunk_size": 32, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False, "rope_scaling": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# As on the hub, with its older names and fields that nothing reads; numbers are small.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Bamba": SIZES | MAMBA | {
        "model_type": "bamba", "num_hidden_layers": 6, "attn_layer_indices": [2, 4], "attn_rotary_emb": 8,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-05, "num_logits_to_keep": 1,
    },
    "GraniteMoeHybrid": SIZES | MAMBA | EXPERTS | {
        "model_type": "granitemoehybrid", "num_hidden_layers": 6, "num_local_experts": 6, "logits_scaling": 2,
        "layer_types": ["attention" if kind == "full_attention" else "mamba" for kind in KINDS], "init_method": "mup",
        "position_embedding_type": "nope", "normalization_function": "rmsnorm", "rope_theta": 10000,
        "attention_multiplier": 0.2, "embedding_multiplier": 6, "residual_multiplier": 0.5, "rms_norm_eps": 1e-05,
        "shared_intermediate_size": 40,
    },
    "FalconH1": SIZES | MAMBA | {
        "model_type": "falcon_h1", "num_hidden_layers": 3, "attn_layer_indices": None, "mamba_d_ssm": 128,
        "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "rope_theta": 1e11,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381,
        "key_multiplier": 0.39, "lm_head_multiplier": 0.0195, "mlp_multipliers": [0.88, 0.35], "projectors_bias": False,
        "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.3535], "ssm_out_multiplier": 0.2357,
        "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "rms_norm_eps": 1e-05,
    },
    "Mamba2": {name: value for name, value in SIZES.items() if "num_" not in name and "inter" not in name} | {
        "model_type": "mamba2", "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16,
        "chunk_size": 32, "conv_kernel": 4, "expand": 2, "hidden_act": "silu", "layer_norm_epsilon": 1e-05,
        "norm_before_gate": True, "residual_in_fp32": True, "rms_norm": True, "rescale_prenorm_residual": False,
        "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
    },
    "NemotronH": SIZES | EXPERTS | {
        "model_type": "nemotron_h", "num_hidden_layers": 9, "hybrid_override_pattern": "MEM*-M*EM", "head_dim": 16,
        "conv_kernel": 4, "expand": 2, "chunk_size": 32, "n_groups": 2, "ssm_state_size": 16, "mamba_head_dim": 16,
        "mamba_num_heads": 8, "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 1e-05, "norm_eps": 1e-05,
        "residual_in_fp32": False, "sliding_window": None, "use_conv_bias": True, "use_bias": False,
        "time_step_floor": 0.1, "time_step_max": 0.1, "time_step_min": 1e-9, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
# Of those that have the same names here and in transformers.
ADAPTED = [
    "in_proj", "out_proj", "q_proj", "o_proj", "mixer.up_proj", "shared_experts.up_proj", "mixer.experts.0.up_proj",
    "mixer.experts.1.down_proj",
]  # fmt: skip


@pytest.fixture(scope="module", params=[name if name == "Bamba" else pytest.param(name, marks=pytest.mark.full)
                                        for name in PUBLISHED])  # fmt: skip
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With a configuration of the hub, and its names of tensors, which transformers writes again."""
    config, architecture = PUBLISHED[request.param], f"{request.param}ForCausalLM"
    folder, model = tmp_path_factory.mktemp("published"), new_model(architecture, config)
    save_as_published(model, folder, architecture, config)
    return folder, model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    return tokens_of_transformers(checkpoint[1])


@pytest.mark.parametrize("options", cuts({"tensor_parallel_size": 2, "enable_expert_parallel": True}), ids=str)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], options: dict[str, Any]
) -> None:
    if "enable_expert_parallel" in options and "num_experts_per_tok" not in checkpoint[1].config.to_dict():
        options = {"tensor_parallel_size": 2}
    assert tokens_of(checkpoint[0], **options) == expected


@pytest.mark.full
def test_tensors_under_the_names_of_transformers_are_read(
    checkpoint: tuple[Path, Any], expected: list[list[int]], tmp_path: Path
) -> None:
    """Experts as one tensor, and `model.` for what the hub calls `backbone.`."""
    are_others = checkpoint[1].config.model_type in ("granitemoehybrid", "nemotron_h")
    check_own_names(checkpoint, tmp_path, expected, are_others=are_others)


@pytest.mark.full
def test_an_adapter_writes_the_tokens_of_its_merged_weights(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    check_adapter(checkpoint[0], tmp_path, ADAPTED)


@pytest.mark.skipif(not runs_native_kernels(), reason="only native steps are captured")
def test_captured_decodes_have_the_bits_of_eager_ones(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "num_experts_per_tok" in checkpoint[1].config.to_dict():
        pytest.skip("steps of experts are not captured")
    check_captured_decodes(checkpoint[0], monkeypatch)
