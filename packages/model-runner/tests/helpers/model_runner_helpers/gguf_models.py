"""GGUF files of small random models, written with the format's own library, and the weights that they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")

# Where a block has its float16 scales.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
# Numbers or scales of these go further.
_SMALLER: Mapping[str, float] = {"Q2_K": 0.5, "IQ4_NL": 0.1, "IQ4_XS": 0.005}
TYPES = (*_SCALES, "F32", "F16", "BF16", "MXFP4")
_LAYER_NORMS = ("gpt2", "phi2", "stablelm", "gptneox", "bloom", "falcon")
_FUSED = ("gpt2", "phi3", "gptneox", "bloom", "falcon")
_UNGATED = ("phi2", "gptneox", "bloom", "falcon")
SIZES = {
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "inner": 512,
    "layers": 2,
    "vocab": 300,
    "positions": 64,
    "experts": 4,
}


def random_data(kind: str, shape: tuple[int, int], seed: int, scale: float = 0.002) -> np.ndarray:
    """Bytes of a tensor with random numbers: [rows, bytes of a row]."""
    generator = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if block_size == 1:
        values = generator.standard_normal(shape, dtype=np.float32) * 20 * scale
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(shape[0], -1)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(114, 119, blocks.shape[:2])  # exponents
    for start in _SCALES.get(kind, ()):
        scales = (
            generator.random(blocks.shape[:2]) * scale * _SMALLER.get(kind, 0.05 if kind.endswith("_K") else 1)
        ).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def meaning(data: np.ndarray, kind: str) -> torch.Tensor:
    """What the library says that the bytes mean, in float32."""
    given = data.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))
    return torch.from_numpy(gguf.quants.dequantize(given, gguf.GGMLQuantizationType[kind]).astype(np.float32))


def write_model(
    path: Path,
    architecture: str,
    kind_of: Callable[[str], str],
    *,
    is_tied: bool = False,
    has_tokenizer: bool = True,
    tensors_per_file: int = 0,
) -> dict[str, torch.Tensor]:
    """Writes a file; the tensors that it means, by their names in it. `mixtral` is `llama` with experts,
    and `falcon-40b` is `falcon` with two norms and two key-value heads.

    `tensors_per_file`: Of parts whose names follow from the path; 0 for one file.
    """
    name = {"mixtral": "llama", "falcon-40b": "falcon"}.get(architecture, architecture)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_per_file)
    _add_metadata(writer, architecture)
    if has_tokenizer:
        add_tokenizer(writer)
    meant: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(_shapes(architecture, is_tied).items()):
        if len(shape) == 1:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1
            meant[name] = values + 1 if "norm" in name and name.endswith("weight") else values
            writer.add_tensor(name, meant[name].numpy())
            continue
        is_plain = name.startswith("position_embd") or "gate_inp" in name or name.endswith("bias")
        kind = "F32" if is_plain else kind_of(name)  # as llama.cpp
        *outer, num_rows, num_inputs = shape
        data = random_data(kind, (math.prod(outer) * num_rows, num_inputs), seed)
        meant[name] = meaning(data, kind).reshape(shape)
        raw = data.view(np.float32) if kind == "F32" else data.view(np.float16) if kind == "F16" else data
        writer.add_tensor(name, raw.reshape(*outer, num_rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_tokenizer(writer: Any) -> None:
    """A byte-level tokenizer without merges, and two special tokens."""
    letters = list(gguf_bytes()) + [f"<extra_{index}>" for index in range(SIZES["vocab"] - 258)]
    tokens = ["<s>", "</s>", *letters]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * len(letters)])
    writer.add_token_merges(["a b"] if "ab" in tokens else [])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def gguf_bytes() -> list[str]:
    """The characters that byte-level tokenizers write bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _add_metadata(writer: Any, architecture: str) -> None:
    writer.add_context_length(SIZES["positions"])
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_block_count(SIZES["layers"])
    is_wide = architecture.removesuffix("-40b") in ("gptneox", "bloom", "falcon")
    writer.add_feed_forward_length(4 * SIZES["hidden"] if is_wide else SIZES["inner"])
    writer.add_head_count(SIZES["heads"])
    if architecture.removesuffix("-40b") in _LAYER_NORMS:
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if architecture in ("gpt2", "gptneox"):
        if architecture == "gptneox":
            writer.add_rope_dimension_count(16)
            writer.add_parallel_residual(True)
        return
    writer.add_head_count_kv(kv_heads(architecture))
    if architecture in ("bloom", "falcon", "falcon-40b"):
        return
    writer.add_rope_freq_base(10_000.0)
    if architecture == "gpt-oss":
        writer.add_key_length(SIZES["hidden"] // SIZES["heads"])
        writer.add_value_length(SIZES["hidden"] // SIZES["heads"])
        writer.add_sliding_window(5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(2.0)
        writer.add_rope_scaling_orig_ctx_len(SIZES["positions"] // 2)
    if architecture in ("mixtral", "qwen3moe", "gpt-oss"):
        writer.add_expert_count(SIZES["experts"])
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(SIZES["inner"])
    if architecture in ("phi2", "stablelm"):
        writer.add_rope_dimension_count(32)
    if architecture == "stablelm":
        writer.add_parallel_residual(False)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(5)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(20.0)
        writer.add_final_logit_softcapping(15.0)


def kv_heads(architecture: str) -> int:
    return {"bloom": SIZES["heads"], "gptneox": SIZES["heads"], "falcon": 1}.get(architecture, SIZES["kv_heads"])


def _shapes(architecture: str, is_tied: bool) -> dict[str, tuple[int, ...]]:
    hidden = SIZES["hidden"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (SIZES["vocab"], hidden)}
    if architecture == "gpt2":
        shapes["position_embd.weight"] = (SIZES["positions"], hidden)
    if architecture == "bloom":
        shapes |= _norm_shapes(architecture, "token_embd_norm")
    for index in range(SIZES["layers"]):
        layer = {**_attention_shapes(architecture), **_feed_forward_shapes(architecture)}
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= _norm_shapes(architecture, "output_norm")
    if architecture == "phi2":
        shapes["output.bias"] = (SIZES["vocab"],)
    return shapes if is_tied else shapes | {"output.weight": (SIZES["vocab"], hidden)}


def _norm_shapes(architecture: str, *names: str) -> dict[str, tuple[int, ...]]:
    kinds = ("weight", "bias") if architecture.removesuffix("-40b") in _LAYER_NORMS else ("weight",)
    return {f"{name}.{kind}": (SIZES["hidden"],) for name in names for kind in kinds}


def _attention_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = SIZES["hidden"], SIZES["hidden"] // SIZES["heads"]
    kv_size = kv_heads(architecture) * head_dim
    shapes: dict[str, tuple[int, ...]] = _norm_shapes(architecture, "attn_norm")
    if architecture == "falcon-40b":
        shapes |= _norm_shapes(architecture, "attn_norm_2")
    if architecture.removesuffix("-40b") in _FUSED:
        kv_size = hidden if architecture == "gpt2" else kv_size
        shapes["attn_qkv.weight"] = (hidden + 2 * kv_size, hidden)
    else:
        shapes |= {"attn_q.weight": (hidden, hidden), "attn_k.weight": (kv_size, hidden)}
        shapes["attn_v.weight"] = (kv_size, hidden)
    shapes["attn_output.weight"] = (hidden, hidden)
    if architecture in ("gpt2", "gptneox", "bloom"):
        shapes |= {"attn_qkv.bias": (3 * hidden,), "attn_output.bias": (hidden,)}
    if architecture == "gpt-oss":
        shapes |= {"attn_output.bias": (hidden,), "attn_sinks.weight": (SIZES["heads"],)}
    if architecture in ("qwen2", "phi2", "stablelm", "gpt-oss"):
        shapes |= {"attn_q.bias": (hidden,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if architecture == "phi2":
        shapes["attn_output.bias"] = (hidden,)
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return shapes


def _feed_forward_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = SIZES["hidden"], SIZES["inner"], SIZES["experts"]
    if architecture.removesuffix("-40b") in _UNGATED:
        inner = inner if architecture == "phi2" else 4 * hidden
        norms = _norm_shapes(architecture, "ffn_norm") if architecture in ("gptneox", "bloom") else {}
        found = norms | {"ffn_up.weight": (inner, hidden), "ffn_down.weight": (hidden, inner)}
        has_bias = not architecture.startswith("falcon")
        return found | ({"ffn_up.bias": (inner,), "ffn_down.bias": (hidden,)} if has_bias else {})
    names = ("ffn_norm",)
    if architecture in ("gemma2", "gemma3"):
        names = ("ffn_norm", "post_attention_norm", "post_ffw_norm")
    if architecture == "gpt-oss":
        names = ("post_attention_norm",)
    shapes = _norm_shapes(architecture, *names)
    if architecture == "gpt-oss":
        shapes |= {
            "ffn_gate_inp.bias": (experts,), "ffn_gate_exps.bias": (experts, inner),
            "ffn_up_exps.bias": (experts, inner), "ffn_down_exps.bias": (experts, hidden),
        }  # fmt: skip
    if architecture in ("mixtral", "qwen3moe", "gpt-oss"):
        return shapes | {
            "ffn_gate_inp.weight": (experts, hidden), "ffn_gate_exps.weight": (experts, inner, hidden),
            "ffn_up_exps.weight": (experts, inner, hidden), "ffn_down_exps.weight": (experts, hidden, inner),
        }  # fmt: skip
    if architecture == "phi3":
        return shapes | {"ffn_up.weight": (2 * inner, hidden), "ffn_down.weight": (hidden, inner)}
    shapes |= {"ffn_up.weight": (inner, hidden), "ffn_down.weight": (hidden, inner)}
    if architecture == "gpt2":
        return shapes | {"ffn_up.bias": (inner,), "ffn_down.bias": (hidden,)}
    return shapes | {"ffn_gate.weight": (inner, hidden)}
