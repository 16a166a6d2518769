"""Models with an adapter merged into their weights: W + scale B A, by the definition of LoRA alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
FAMILY_TO_TARGETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LlamaForCausalLM": (TINY, (*LINEARS, "embed_tokens", "lm_head")),
    "Qwen2ForCausalLM": (TINY, ("q_proj", "v_proj", "down_proj")),
    "Qwen3ForCausalLM": ({**TINY, "head_dim": 8}, LINEARS),
    "Phi3ForCausalLM": (TINY | {"pad_token_id": 0}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "MixtralForCausalLM": ({**TINY, "num_local_experts": 4}, (*ATTENTION, "w1", "w3", "w2")),
    "GptOssForCausalLM": (
        {**TINY, "head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
        (*ATTENTION, "embed_tokens", "lm_head"),
    ),
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 97},
        ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    ),
}


def write_config(folder: Path, architecture: str, **overrides: Any) -> Path:
    """Writes the config.json of a tiny model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"architectures": [architecture], **FAMILY_TO_TARGETS[architecture][0], **overrides}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Writes the model with the adapter merged into it; returns the folder."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    is_transposed = "gpt2" in str(json.loads((model / "config.json").read_text())["architectures"]).lower()
    for name, factor in factors.items():
        if not name.endswith(("lora_A.weight", "lora_embedding_A")):
            continue
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        a, b = factor.double(), factors[name.replace("_A", "_B")].double()
        if module.endswith((".experts", ".experts.base_layer")):
            _merge_experts(weights, module.removesuffix(".base_layer"), "base_layer" in module, a, b, config)
            continue
        update = _scale_of(config, module) * b @ a
        weight = weights[f"{module}.weight"].double() + (update.T if is_transposed or "embedding" in name else update)
        weights[f"{module}.weight"] = weight.float().contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


def _merge_experts(
    weights: dict[str, Any], module: str, is_inner: bool, a: Any, b: Any, config: dict[str, Any]
) -> None:
    """Changes the matrices of all experts as peft does, which wraps the products of a module in their order."""
    names = [
        name for name in ("gate_up_proj", "down_proj") if any(one.endswith(name) for one in config["target_parameters"])
    ]
    name = names[-2 if is_inner else -1]
    scale = _scale_of(config, f"{module}.{name}")
    rank = _of(config.get("rank_pattern", {}), f"{module}.{name}", config["r"])
    updates = torch.einsum("o r e, e r i -> e o i", b.unflatten(1, (rank, -1)), a.unflatten(0, (-1, rank))) * scale
    if f"{module}.{name}" in weights:  # gpt-oss: [experts, inputs, outputs]
        weights[f"{module}.{name}"] = (weights[f"{module}.{name}"].double() + updates.mT).float().contiguous()
        return
    parts = ("w1", "w3") if name == "gate_up_proj" else ("w2",)
    for expert, update in enumerate(updates):
        for part, own in zip(parts, update.chunk(len(parts)), strict=True):
            key = f"{module}.{expert}.{part}.weight"
            weights[key] = (weights[key].double() + own).float().contiguous()


def _scale_of(config: dict[str, Any], module: str) -> float:
    alpha = _of(config.get("alpha_pattern", {}), module, config["lora_alpha"])
    rank = _of(config.get("rank_pattern", {}), module, config["r"])
    scale: float = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return scale


def _of(patterns: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if module.endswith(f".{key}")), default)
