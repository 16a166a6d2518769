"""Quantized checkpoints through transformers' code compute what transformers computes with the weights they mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from model_runner_helpers.quantized_layers import CASES, Draws, fp8
from safetensors.torch import load_file, save_file

from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

from llmstack_model_runner.models.transformers_backend import stored  # noqa: E402
from llmstack_model_runner.models.transformers_backend.model import TransformersModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
TOLERANCE = 2e-5
CPU = torch.device("cpu")
# As the hub has it, with small sizes.
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "head_dim": 16, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "quant_method": "fp8",
    "weight_block_size": [16, 32],
}


def fp8_blocks(draws: Draws) -> Any:
    """One scale for each 16 outputs and 32 inputs."""
    square, weight = fp8("block", suffix="weight_scale_inv", block=16)(draws)
    scales = square["weight_scale_inv"][:, ::2].contiguous()
    codes = square["weight"].double().numpy()
    full = scales.double().repeat_interleave(16, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": square["weight"], "weight_scale_inv": scales}, codes * full.numpy()


FORMATS = {**CASES, "fp8 by small blocks": (FP8_BLOCKS, fp8_blocks)}

# Class to its configuration as published, a format, some names of tensors as the hub has them, layers without a use.
FAMILIES: dict[str, tuple[dict[str, Any], str, tuple[str, ...], tuple[str, ...]]] = {
    "MiniMaxM2ForCausalLM": (
        {"model_type": "minimax_m2", "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rotary_dim": 8, "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
         "use_routing_bias": True, "num_mtp_modules": 3, "use_mtp": True, "attn_type_list": [1, 1],
         "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}},
        "fp8 by small blocks",
        ("model.layers.1.block_sparse_moe.experts.3.w3.weight_scale_inv",
         "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        (),
    ),
    "Glm4MoeForCausalLM": (
        {"model_type": "glm4_moe", "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True,
         "num_nextn_predict_layers": 1},
        "compressed fp8",
        ("model.layers.1.mlp.experts.0.up_proj.weight_scale",
         "model.layers.1.mlp.shared_experts.down_proj.weight_scale"),
        ("model.layers.2.eh_proj", "model.layers.2.shared_head.head"),
    ),
    "HYV3ForCausalLM": (
        {"model_type": "hy_v3", "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
         "num_shared_experts": 1, "first_k_dense_replace": 1, "expert_hidden_dim": 48},
        "fp8 by small blocks",
        ("model.layers.1.mlp.router.gate.weight", "model.layers.1.mlp.shared_mlp.up_proj.weight_scale_inv"),
        (),
    ),
    "Ernie4_5_MoeForCausalLM": (
        {"model_type": "ernie4_5_moe", "moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2,
         "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_interval": 1, "use_bias": False},
        "compressed w4a16",
        ("model.layers.1.mlp.experts.2.gate_proj.weight_packed",
         "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
        (),
    ),
    "Qwen2MoeForCausalLM": (
        {"model_type": "qwen2_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
         "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": False},
        "gptq 4",
        ("model.layers.0.mlp.experts.1.down_proj.qweight", "model.layers.0.mlp.shared_expert.up_proj.qweight"),
        (),
    ),
    "LagunaForCausalLM": (
        {"model_type": "laguna", "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
         "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8]},
        "compressed fp8",
        ("model.layers.1.mlp.experts.e_score_correction_bias", "model.layers.1.mlp.shared_expert.up_proj.weight_scale"),
        (),
    ),
    "SeedOssForCausalLM": (
        {"model_type": "seed_oss", "attention_bias": True, "intermediate_size": 128},
        "awq",
        ("model.layers.0.self_attn.q_proj.qweight", "model.layers.0.self_attn.q_proj.bias"),
        (),
    ),
}  # fmt: skip
QUANTIZED = re.compile(r"(proj|\.w[123]|linear)\.weight$")


def write_checkpoints(folder: Path, architecture: str, config: dict[str, Any], case: str) -> tuple[Path, Path]:
    """A quantized checkpoint with the hub's names, and one in full precision of what its weights mean."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class.from_dict(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.normal_(std=0.1)
    plain, quantized = folder / "plain", folder / "quantized"
    model.save_pretrained(plain)
    fields, make = FORMATS[case]
    given = load_file(plain / "model.safetensors")
    tensors, meant = dict(given), dict(given)
    for seed, (name, tensor) in enumerate(given.items()):
        if QUANTIZED.search(name) and ".layers." in name:
            made, weight = make(Draws(*tensor.shape, seed))
            meant[name] = torch.from_numpy(weight).float()
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in made.items()}
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    quantized.mkdir()
    save_file(tensors, quantized / "model.safetensors")
    (quantized / "config.json").write_text(
        json.dumps({"architectures": [architecture], **config, "quantization_config": fields})
    )
    return quantized, plain


def add_unused(folder: Path, layers: tuple[str, ...], case: str) -> None:
    """Layers that the model does not have, as of multi-token prediction."""
    tensors = load_file(folder / "model.safetensors")
    for layer in layers:
        made, _ = FORMATS[case][1](Draws(64, 64, 0))
        tensors |= {f"{layer}.{suffix}": part for suffix, part in made.items()}
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersModel:
    config = json.loads((folder / "config.json").read_text()) | changes
    model = TransformersModel(config, dtype, CPU)
    load_weights(model, folder, checkpoint_format=read_format(config))
    return model


def expected_logits(folder: Path, architecture: str) -> torch.Tensor:
    reference = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.fixture
def nothing_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a weight is not kept as it is stored."""

    def refuse(weight: object, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("a weight is widened")

    monkeypatch.setattr(stored, "_widen", refuse)


def check(model: TransformersModel, expected: torch.Tensor) -> None:
    harness = PagedHarness(model, torch.float32)
    found = torch.cat([harness.step([("a", PROMPT[:7])]), harness.step([("a", PROMPT[7:])])])
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.usefixtures("nothing_is_widened")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_published_family_equals_transformers(architecture: str, tmp_path: Path) -> None:
    values, case, names, unused = FAMILIES[architecture]
    quantized, plain = write_checkpoints(tmp_path, architecture, SMALL | values, case)
    assert set(names) <= set(load_file(quantized / "model.safetensors"))
    add_unused(quantized, unused, case)
    check(load(quantized), expected_logits(plain, architecture))


LLAMA = SMALL | {"model_type": "llama", "hidden_size": 128, "head_dim": 32, "intermediate_size": 192}
REPRESENTATIVES = {"fp8 by block, dynamic", "gptq 4 with an order", "mxfp4"}


@pytest.mark.usefixtures("nothing_is_widened")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in REPRESENTATIVES else pytest.mark.full) for case in CASES]
)
def test_every_format_equals_transformers(case: str, tmp_path: Path) -> None:
    quantized, plain = write_checkpoints(tmp_path, "LlamaForCausalLM", LLAMA, case)
    check(load(quantized), expected_logits(plain, "LlamaForCausalLM"))


def test_what_transformers_cuts_apart_is_widened(tmp_path: Path) -> None:
    values = SMALL | {"model_type": "glm", "partial_rotary_factor": 0.5}
    quantized, plain = write_checkpoints(tmp_path, "GlmForCausalLM", values, "compressed fp8")
    check(load(quantized), expected_logits(plain, "GlmForCausalLM"))


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    values, case, *_ = FAMILIES["MiniMaxM2ForCausalLM"]
    quantized, _ = write_checkpoints(tmp_path, "MiniMaxM2ForCausalLM", SMALL | values, case)
    with pytest.raises(
        ValueError, match=r"of a wrong shape: .*experts.gate_up_proj of an expert \[48, 64\] and \[48, 64\]"
    ):
        load(quantized, intermediate_size=32)
    quantized, _ = write_checkpoints(tmp_path / "dense", "LlamaForCausalLM", LLAMA, "awq")
    with pytest.raises(ValueError, match=r"q_proj.weight \[128, 128\] instead of \[256, 128\]"):
        load(quantized, num_attention_heads=8)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    values, case, *_ = FAMILIES["MiniMaxM2ForCausalLM"]
    quantized, _ = write_checkpoints(tmp_path, "MiniMaxM2ForCausalLM", SMALL | values, case)
    tensors = load_file(quantized / "model.safetensors")
    part = "model.layers.1.block_sparse_moe.experts.3.w1"
    save_file({name: tensor for name, tensor in tensors.items() if part not in name}, quantized / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.gate_up_proj of 3 experts instead of 4"):
        load(quantized)
