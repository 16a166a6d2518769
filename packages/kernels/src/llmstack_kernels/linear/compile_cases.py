"""Linear layers of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase
from llmstack_kernels.linear.configurations import CHUNK_SIZES
from llmstack_kernels.linear.packed_formats import pack_chunks
from llmstack_kernels.linear.quantization import empty_quantized
from llmstack_kernels.linear.triton import TritonLinear

_CLAIMS: dict[str, tuple[Claim, ...]] = {"_linear_kernel": ("wgmma", "pdl")}
_FLOAT32_CLAIMS: dict[str, tuple[Claim, ...]] = {"_linear_kernel": ("pdl",)}  # tensor cores would round it
# Inputs, outputs and what follows the product.
_LAYERS = {
    "gpt2_qkv": (768, 2304, "none"),
    "gpt2_up": (768, 3072, "gelu_tanh"),
    "1b_qkv": (2048, 3072, "none"),
    "1b_head": (2048, 128256, "none"),
    "8b_qkv": (4096, 6144, "none"),
    "8b_gate_up": (4096, 28672, "silu_and_mul"),
    "8b_down": (14336, 4096, "residual"),
}


def cases() -> Iterator[CompileCase]:
    """Layers of GPT-2 124M, Llama 1B and 8B: few rows, and any number where they must not depend on it."""
    for name in _LAYERS:
        yield _case(name, "plain", 1, is_sample=name == "8b_qkv")
    for num_rows in (32, 64, 256, 2048):
        for name in ("8b_gate_up", "8b_down"):
            yield _case(name, "plain", num_rows)
    for scheme in CHUNK_SIZES:
        yield from (_case(name, scheme, num_rows) for name in ("gpt2_up", "8b_down") for num_rows in (1, 64))
        yield _case("8b_gate_up", scheme, 512)
        yield _case("8b_down", scheme, 2048)
        widen = _layer("8b_qkv", scheme, torch.bfloat16).widen
        yield CompileCase(f"widen_8b_qkv_{scheme}_bf16", widen, is_sample=scheme == "int4")
    yield _case("gpt2_up", "plain", 8, torch.float16)
    for num_rows in (1, 1000):
        yield _case("gpt2_up", "plain", num_rows, torch.float32)


def _case(
    name: str, weight_format: str, num_rows: int, dtype: torch.dtype = torch.bfloat16, is_sample: bool = False
) -> CompileCase:
    in_features, out_features, follows = _LAYERS[name]
    x = torch.empty(num_rows, in_features, dtype=dtype, device="meta")
    residual = torch.empty(num_rows, out_features, dtype=dtype, device="meta") if follows == "residual" else None
    activation = "none" if follows == "residual" else follows
    out_dtype = torch.float32 if name.endswith("head") else None
    call = partial(_layer(name, weight_format, dtype), x, activation, residual, out_dtype)
    suffix = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
    # For 8.0 two registers are spilled, once per tile and outside of the loop: by the gate of the widest tile, which is
    # made for wgmma, and where a program adds most parts.
    spills = (("8b_gate_up", "plain", 2048), ("8b_down", "int4", 1))
    min_arch = 90 if (name, weight_format, num_rows) in spills else 80
    claims = _FLOAT32_CLAIMS if dtype == torch.float32 else _CLAIMS
    return CompileCase(f"{name}_{weight_format}_{num_rows}_rows_{suffix}", call, is_sample, claims, min_arch)


def _layer(name: str, weight_format: str, dtype: torch.dtype) -> TritonLinear:
    in_features, out_features, _ = _LAYERS[name]
    bias = torch.empty(out_features, dtype=dtype, device="meta") if name.startswith("gpt2") else None
    if weight_format == "plain":
        weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        return TritonLinear((out_features, in_features), dtype, bias, weight, None, "plain", None)
    unpacked = torch.empty(out_features, in_features, dtype=dtype, device="meta")
    weight, scales = pack_chunks(empty_quantized(unpacked, weight_format))
    return TritonLinear((out_features, in_features), dtype, bias, weight, scales, weight_format, None)
