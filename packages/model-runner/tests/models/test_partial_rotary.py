"""`partial_rotary_factor` means in every architecture of the table what transformers' class for it makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_files import read_model_config
from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16,
}  # fmt: skip
OWN_SIZES = {
    name: {
        "vocab_size": 97,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 8,
        "initializer_range": 0.3,
    }
    for name in ("GPT2LMHeadModel", "GPTJForCausalLM")
} | {
    "BloomForCausalLM": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    "FalconForCausalLM": {key: value for key, value in SIZES.items() if key != "head_dim"},
    "OPTForCausalLM": SIZES | {"ffn_dim": 40, "word_embed_proj_dim": 64, "init_std": 0.3},
} | {
    name: {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_local_experts")} | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 16,
    }
    for name in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
}  # fmt: skip
OWN_SIZES |= {
    name: OWN_SIZES["DeepseekV3ForCausalLM"] | {
        "q_lora_rank": 16, "index_topk": 4, "index_n_heads": 16, "index_head_dim": 24
    }
    for name in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
}  # fmt: skip
OWN_SIZES["Glm4MoeForCausalLM"] = {key: value for key, value in SIZES.items() if key != "num_local_experts"} | {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
}  # fmt: skip
OWN_SIZES |= {
    name: SIZES | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "num_experts": 3,
        "initializer_range": 0.1,
    }
    for name in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
}  # fmt: skip
OWN_SIZES |= {
    name: {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    for name in ("MambaForCausalLM", "FalconMambaForCausalLM")
}
OWN_SIZES["JambaForCausalLM"] = SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 3}
OWN_SIZES |= {
    name: {key: value for key, value in OWN_SIZES["DeepseekV3ForCausalLM"].items() if key != "n_routed_experts"} | {
        "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], **own
    }
    for name, own in {
        "KimiLinearForCausalLM": {"linear_head_dim": 16, "linear_num_heads": 2}, "BailingHybridForCausalLM": {},
    }.items()
}  # fmt: skip
OWN_SIZES["Zamba2ForCausalLM"] = SIZES | {
    "layers_block_type": ["linear_attention", "hybrid"], "use_mem_rope": True, "time_step_min": 1e-9,
}  # fmt: skip
OWN_SIZES["MiniMaxForCausalLM"] = SIZES | {"layer_types": ["linear_attention", "full_attention"]}
OWN_SIZES["OlmoHybridForCausalLM"] = SIZES | {"layer_types": ["linear_attention", "full_attention"]}
OWN_SIZES["Lfm2MoeForCausalLM"] = SIZES | {
    "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 3
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
OWN_SIZES["Mamba2ForCausalLM"] = SIZES | {"num_heads": 8, "head_dim": 16}
OWN_SIZES["NemotronHForCausalLM"] = SIZES | {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "layers_block_type": ["mamba", "attention", "mlp"],
    "time_step_min": 1e-9, "time_step_floor": 0.1,
}  # fmt: skip
OWN_SIZES["FalconH1ForCausalLM"] = SIZES | MAMBA | {"mamba_d_ssm": None}
OWN_SIZES["BambaForCausalLM"] = SIZES | MAMBA | {"attn_layer_indices": [1]}
OWN_SIZES["GraniteMoeHybridForCausalLM"] = SIZES | MAMBA | {
    "layer_types": ["mamba", "attention"], "position_embedding_type": "rope"
}  # fmt: skip
# Whisper's decoder reads sound, and rotates nothing; transformers computes Mistral 4 with YaRN alone.
OTHERS = ("WhisperForConditionalGeneration", "Mistral4ForCausalLM")
DECODERS = [name for name in ARCHITECTURES if hasattr(transformers, name) and name not in OTHERS]
PARTLY_ROTATED = (
    "Glm4MoeForCausalLM",
    "GPTNeoXForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "StableLmForCausalLM",
)
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
HALF = {"partial_rotary_factor": 0.5}


def beside_the_others(rope: dict[str, Any]) -> dict[str, Any]:
    """The older form; gpt-oss would be of type yarn without a type."""
    return {"rope_theta": 500.0, **HALF} | ({"rope_scaling": DEFAULT} if rope.get("rope_type") == "yarn" else {})


def within_them(rope: dict[str, Any]) -> dict[str, Any]:
    if "full_attention" in rope:
        return {"rope_parameters": {kind: {**values, **HALF} for kind, values in rope.items()}}
    return {"rope_parameters": {**DEFAULT, **HALF}}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", [beside_the_others, within_them])
@pytest.mark.parametrize("architecture", DECODERS)
def test_logits_with_a_partial_rotary_factor_equal_transformers(architecture: str, form: Any, tmp_path: Path) -> None:
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    made = model_class(model_class.config_class(**OWN_SIZES.get(architecture, SIZES)))
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= form(config.pop("rope_parameters", None) or {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT]), use_cache=False).logits[0]
    model = load_model_class(architecture)(read_model_config(tmp_path, {}), torch.float32, torch.device("cpu"))
    load_weights(model, tmp_path)
    found = PagedHarness(model, torch.float32).step([("a", PROMPT)])  # type: ignore[arg-type]  # a decoder
    assert (found - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("architecture", PARTLY_ROTATED)
def test_families_that_rotate_a_part_of_each_head_still_do(architecture: str) -> None:
    sizes = OWN_SIZES.get(architecture, SIZES)
    config = sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    settings = load_model_class(architecture).read_settings(config)  # type: ignore[attr-defined]  # every decoder has it
    rope = settings.rope if hasattr(settings, "rope") else settings.layers[0].rope
    assert rope.rotary_dim == 8


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaled_embedding_of_a_part_is_refused_where_transformers_fails(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=f"partial_rotary_factor 0.5 with a rotary embedding of type {kind}"):
        parse_rope({"rope_parameters": rope}, 16, 64)
    assert parse_rope({"rope_parameters": rope}, 16, 64, is_partial=True).rotary_dim == 8
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(RuntimeError, match="must match"):
        reference(torch.tensor([PROMPT]))
