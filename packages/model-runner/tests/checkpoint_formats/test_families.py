"""Every family reads quantized checkpoints: it computes what it does with the weights that the checkpoint means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.quantized_layers import CASES, Draws

from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.checkpoint_formats.read import read_quantized
from llmstack_model_runner.layers.weight_slot import WeightKind
from llmstack_model_runner.models import load_model_class

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
CASE = "compressed w8a8"
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
GPT_SIZES: dict[str, Any] = {"vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
DELTA_NETS = SIZES | {
    "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
MAMBA = SIZES | {
    "intermediate_size": 64, "num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
    "mamba_n_groups": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 64, "n_layer": 1, "n_head": 4}),
    "falcon with groups": ("FalconForCausalLM", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with one kv head": ("FalconForCausalLM", SIZES | {"multi_query": True}),
    "gemma 2": ("Gemma2ForCausalLM", SIZES | {"head_dim": 16, "query_pre_attn_scalar": 5, "tie_word_embeddings": True}),
    "gpt-2": ("GPT2LMHeadModel", GPT_SIZES),
    "gpt-j": ("GPTJForCausalLM", GPT_SIZES | {"rotary_dim": 8}),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZES | {"hidden_act": "gelu"}),
    "opt": ("OPTForCausalLM", SIZES | {"word_embed_proj_dim": 64, "ffn_dim": 48}),
    "phi": ("PhiForCausalLM", SIZES | {"hidden_act": "gelu_new"}),
    "phi-3": ("Phi3ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 16}),
    "qwen3 with experts": (
        "Qwen3MoeForCausalLM",
        SIZES | {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "stablelm": ("StableLmForCausalLM", SIZES),
    "qwen 3.5": ("Qwen3_5ForCausalLM", DELTA_NETS),
    "qwen 3.5 with experts": ("Qwen3_5MoeForCausalLM", DELTA_NETS),
    "bamba": ("BambaForCausalLM", MAMBA | {"attn_layer_indices": [1]}),
    "granite 4 h": (
        "GraniteMoeHybridForCausalLM",
        MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 3, "shared_intermediate_size": 64},
    ),
    "falcon h1": ("FalconH1ForCausalLM", MAMBA | {"mamba_d_ssm": None}),
    "nemotron h": (
        "NemotronHForCausalLM",
        SIZES
        | {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "intermediate_size": 64,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 3,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 64,
        },
    ),
    "qwen3 next": ("Qwen3NextForCausalLM", DELTA_NETS),
    "jamba": (
        "JambaForCausalLM",
        SIZES
        | {"num_hidden_layers": 2, "intermediate_size": 64, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"num_experts": 3, "mamba_dt_rank": 64},
    ),
    "zamba 2": (
        "Zamba2ForCausalLM",
        SIZES | {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 64},
    ),
    "olmo hybrid": ("OlmoHybridForCausalLM", DELTA_NETS | {"head_dim": None, "linear_key_head_dim": 16}),
}
# What published checkpoints of these families leave in full precision.
IN_FULL_PRECISION = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, CASE) for family in FAMILIES]
    + [(family, case) for family in ("qwen 3.5", "qwen3 next") for case in ("fp8 by block, dynamic", "awq", "gptq 4")],
)
def test_a_family_computes_with_the_weights_that_a_quantized_checkpoint_means(family: str, case: str) -> None:
    architecture, config = FAMILIES[family]
    model_class = load_model_class(architecture)
    quantized, plain = (model_class(config, torch.float32, CPU) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    fields, make = CASES[case]
    given: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for seed, (name, slot) in enumerate(quantized.slots().items()):
        if slot.load_stored is None or (
            family.startswith(("qwen 3.5", "qwen3 n")) and name.endswith(IN_FULL_PRECISION)
        ):
            tensor = torch.randn(slot.shape, generator=generator) * 0.1
            given[name] = meant[name] = tensor + 1 if slot.kind is WeightKind.SCALE else tensor
            continue
        num_outputs, num_inputs = slot.stored_shape or slot.shape
        tensors, weight = make(Draws(num_outputs, num_inputs, seed))
        given |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in tensors.items()}
        wide = torch.from_numpy(weight).float()
        is_transposed = family == "gpt-2" and ".h." in name  # as its plain checkpoints are
        meant[name] = wide.t() if is_transposed else wide
    checkpoint = read_format({"quantization_config": fields})
    assert checkpoint is not None
    read = list(read_quantized(checkpoint, [*given], given.__getitem__))
    assert sum(isinstance(tensor, UnreadWeight) for _, tensor in read) >= 4
    quantized.load_weights(read)
    plain.load_weights(meant.items())
    logits = []
    for model in (quantized, plain):
        model.finish_loading()
        logits.append(PagedHarness(model, torch.float32).step([("a", PROMPT)]))  # type: ignore[arg-type]  # decoders
    assert (logits[0] - logits[1]).abs().max() <= 2e-5 * logits[1].abs().max()
