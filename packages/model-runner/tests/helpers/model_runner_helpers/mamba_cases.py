"""Configurations of Granite and of models with state spaces of Mamba-2, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
BAMBA = _SIZES | {
    "num_hidden_layers": 4, "attn_layer_indices": [2], "head_dim": 8, "initializer_range": 0.2, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
GRANITE = {name: value for name, value in BAMBA.items() if name not in ("attn_layer_indices", "head_dim")} | {
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 40, "num_local_experts": 5,
    "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
    "logits_scaling": 4.0,
}  # fmt: skip
FALCON = {name: value for name, value in BAMBA.items() if name != "attn_layer_indices"} | {
    "num_hidden_layers": 3, "mamba_d_ssm": 64, "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8], "key_multiplier": 0.6,
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "attention_in_multiplier": 0.9, "mlp_multipliers": [0.8, 0.4],
    "attention_out_multiplier": 0.7, "embedding_multiplier": 4.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
NEMOTRON = _SIZES | {
    "initializer_range": 0.2, "head_dim": 16, "layers_block_type": ["mamba", "moe", "attention", "mlp", "mlp", "mamba"],
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 16,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7,
    "moe_shared_expert_intermediate_size": 40, "time_step_min": 1e-9, "time_step_floor": 0.1,
}  # fmt: skip
MAMBA2 = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "n_groups": 2,
    "state_size": 12, "chunk_size": 16, "initializer_range": 0.3,
}  # fmt: skip
ZAMBA = _SIZES | {
    "tie_word_embeddings": True, "num_hidden_layers": 6, "num_key_value_heads": 4, "n_mamba_heads": 8,
    "mamba_d_state": 12, "mamba_ngroups": 2, "chunk_size": 16, "initializer_range": 0.1, "num_mem_blocks": 2,
    "adapter_rank": 5, "use_mem_rope": True, "use_shared_attention_adapter": True, "time_step_min": 1e-9,
    "time_step_floor": 0.1, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
}  # fmt: skip
DENSE_GRANITE = _SIZES | {
    "num_hidden_layers": 2, "initializer_range": 0.3, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
MAMBA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("Granite", DENSE_GRANITE),
    "granite tied, with biases": (
        "Granite",
        DENSE_GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "granite 4 h": ("GraniteMoeHybrid", GRANITE),
    "granite 4 h without experts, with rope and one group": (
        "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1},
    ),
    "granite 4 of attention alone": (
        "GraniteMoeHybrid",
        GRANITE | {"num_local_experts": 0, "layer_types": ["attention"] * 4, "tie_word_embeddings": True},
    ),
    "falcon h1": ("FalconH1", FALCON),
    "falcon h1 with a norm before the gate, and biases": (
        "FalconH1",
        FALCON
        | {"mamba_rms_norm": True, "attention_bias": True, "projectors_bias": True, "mamba_proj_bias": True}
        | {"mlp_bias": True, "mlp_multipliers": None, "mamba_d_ssm": None, "tie_word_embeddings": True},
    ),
    "falcon h1 with a norm behind the gate": (
        "FalconH1",
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1},
    ),
    "nemotron h": ("NemotronH", NEMOTRON),
    "nemotron h with latent experts in groups, and biases": (
        "NemotronH",
        NEMOTRON
        | {"moe_latent_size": 20, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "use_bias": True}
        | {"mlp_bias": True, "n_groups": 1, "use_conv_bias": False},
    ),
    "mamba 2": ("Mamba2", MAMBA2),
    "mamba 2 tied, with biases": (
        "Mamba2",
        MAMBA2 | {"use_bias": True, "tie_word_embeddings": True, "n_groups": 1, "conv_kernel": 3},
    ),
    "zamba 2": ("Zamba2", ZAMBA),
    "zamba 2 with biases, one block first of all, without positions": (
        "Zamba2",
        ZAMBA
        | {"add_bias_linear": True, "num_mem_blocks": 1, "use_mem_rope": False}
        | {"use_shared_attention_adapter": False, "num_key_value_heads": 2, "mamba_d_conv": 5, "mamba_ngroups": 1}
        | {"layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "num_hidden_layers": 4},
    ),
    "zamba 2 with blocks that nothing ties": ("Zamba2", ZAMBA | {"tie_word_embeddings": False}),
    "bamba": ("Bamba", BAMBA),
    "bamba tied, with biases, one group, a longer convolution and bounded steps": (
        "Bamba",
        BAMBA
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True}
        | {"mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_d_conv": 5, "time_step_limit": (0.0, 1.0)},
    ),
}
