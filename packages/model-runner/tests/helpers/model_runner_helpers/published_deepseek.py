"""Checkpoints of DeepSeek V3 and its successors as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from llmstack_model_runner.checkpoint_formats.config import read_format
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights
from model_runner_helpers.quantized_layers import Draws, fp8

CPU = torch.device("cpu")
# As published: old names of RoPE, a layer of multi-token prediction, and fields that only the first code reads.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 160,
    "kv_lora_rank": 128,
    "max_position_embeddings": 640,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "v_head_dim": 32,
    "vocab_size": 97,
}  # fmt: skip


_NOT_ROUNDED = ("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight", "indexer.weights_proj.weight")


def write_published(folder: Path, *, is_fp8: bool, **changes: Any) -> tuple[dict[str, Any], Any]:
    """A checkpoint with the names and formats of the hub's, and transformers' model of the weights it means.

    `changes`: Fields of another class of the family too, by its `architectures`.
    """
    config = PUBLISHED | changes
    family = config["architectures"][0].removesuffix("ForCausalLM")
    torch.manual_seed(0)
    unknown = ("auto_map", "architectures", "rope_scaling", "rope_theta", "torch_dtype")
    rope = config["rope_scaling"] | {"rope_type": "yarn", "rope_theta": config["rope_theta"]}
    known = {name: value for name, value in config.items() if name not in unknown}
    made = getattr(transformers, f"{family}Config")(**known, rope_parameters=rope, initializer_range=0.1)
    reference = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    for name, parameter in [*reference.named_parameters(), *reference.named_buffers()]:
        if name.endswith(("norm.weight", "norm.bias", "correction_bias")):
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(folder)  # with the hub's names
    tensors = load_file(folder / "model.safetensors")
    if is_fp8:
        config |= {"quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        }}  # fmt: skip
        for seed, name in enumerate(sorted(tensors)):
            weight = tensors[name]
            if weight.ndim != 2 or name.endswith(_NOT_ROUNDED):
                continue
            stored, widened = fp8("block", suffix="weight_scale_inv")(Draws(*weight.shape, seed))
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in stored.items()}
            put(reference, name, torch.from_numpy(widened).float())
    tensors |= {
        f"model.layers.{made.num_hidden_layers}.{name}": torch.ones(3) for name in ("eh_proj.weight", "enorm.weight")
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return config, reference


def put(reference: Any, name: str, weight: torch.Tensor) -> None:
    """Gives transformers' model a tensor of the checkpoint: it has those of all experts as one."""
    state = dict(reference.named_parameters())
    if name in state:
        state[name].data.copy_(weight)
        return
    stem, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        state[f"{stem}.experts.down_proj"].data[int(expert)].copy_(weight)
        return
    gate_up = state[f"{stem}.experts.gate_up_proj"].data[int(expert)].chunk(2)
    gate_up[0 if part == "gate_proj" else 1].copy_(weight)


def load(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """llmstack's model with the checkpoint's weights."""
    model = load_model_class(config["architectures"][0])(config, dtype, CPU)
    load_weights(model, folder, checkpoint_format=read_format(config))
    return model
