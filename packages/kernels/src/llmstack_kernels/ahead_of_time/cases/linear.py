"""Compile cases of linear layers and layers of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase, meta_tensor
from llmstack_kernels.grouped_linear import triton as grouped_linear
from llmstack_kernels.linear.dynamic import DynamicWeight
from llmstack_kernels.linear.packed_formats import pack_chunks
from llmstack_kernels.linear.quantization import QUANTIZATIONS, empty_quantized
from llmstack_kernels.linear.triton import TritonLinear
from llmstack_kernels.linear.triton_dynamic import TritonDynamicLinear
from llmstack_kernels.low_rank import triton as low_rank
from llmstack_kernels.low_rank.slots import LowRankSlots

_LINEAR_CLAIMS: dict[str, tuple[Claim, ...]] = {"_linear_kernel": ("wgmma", "pdl")}
_LINEAR_FLOAT32_CLAIMS: dict[str, tuple[Claim, ...]] = {"_linear_kernel": ("pdl",)}  # tensor cores would round it
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
# Formats of quantized checkpoints alone: words and scales of a chunk and an output, and the type of the scales.
_STORED_SHAPES: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {
    "fp8_block": (64, (), torch.float32),
    "int4_zeros": (32, (5,), torch.int32),
    "mxfp4": (32, (), torch.int32),
}


def _linear_cases() -> Iterator[CompileCase]:
    """Layers of GPT-2 124M, Llama 1B and 8B: few rows, and any number where they must not depend on it."""
    for name in _LAYERS:
        yield _case(name, "plain", 1, is_sample=name == "8b_qkv")
    for num_rows in (32, 64, 256, 2048):
        for name in ("8b_gate_up", "8b_down"):
            yield _case(name, "plain", num_rows)
    for scheme in QUANTIZATIONS:
        yield from (_case(name, scheme, num_rows) for name in ("gpt2_up", "8b_down") for num_rows in (1, 64))
        yield _case("8b_gate_up", scheme, 512)
        yield _case("8b_down", scheme, 2048)
        widen = _layer("8b_qkv", scheme, torch.bfloat16).widen
        yield CompileCase(f"widen_8b_qkv_{scheme}_bf16", widen, is_sample=scheme == "int4")
    for stored in _STORED_SHAPES:
        yield from (_case("8b_down", stored, num_rows) for num_rows in (1, 64))
        widen = _layer("8b_qkv", stored, torch.bfloat16).widen
        yield CompileCase(f"widen_8b_qkv_{stored}_bf16", widen, is_sample=False)
    yield from (_dynamic_case(*sizes) for sizes in (("8b_qkv", 1), ("8b_down", 64), ("8b_gate_up", 2048)))
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
    claims = _LINEAR_FLOAT32_CLAIMS if dtype == torch.float32 else _LINEAR_CLAIMS
    return CompileCase(f"{name}_{weight_format}_{num_rows}_rows_{suffix}", call, is_sample, claims, min_arch)


def _dynamic_case(name: str, num_rows: int) -> CompileCase:
    in_features, out_features, follows = _LAYERS[name]
    weight = torch.empty(out_features, in_features, dtype=torch.int8, device="meta")
    packed = TritonDynamicLinear(DynamicWeight(weight, torch.empty(out_features, device="meta")), None)
    x, residual = meta_tensor(num_rows, in_features), meta_tensor(num_rows, out_features)
    call = partial(packed, x, "none", residual) if follows == "residual" else partial(packed, x, follows)
    # Warp groups multiply integers on 9.0 from 17 rows on; the compiler has nothing for them on 10.0.
    claims: dict[str, tuple[Claim, ...]] = dict.fromkeys(("_round_rows_kernel", "_dynamic_linear_kernel"), ("pdl",))
    return CompileCase(f"{name}_int8_dynamic_{num_rows}_rows_bf16", call, num_rows == 64, claims)


def _layer(name: str, weight_format: str, dtype: torch.dtype) -> TritonLinear:
    in_features, out_features, _ = _LAYERS[name]
    bias = torch.empty(out_features, dtype=dtype, device="meta") if name.startswith("gpt2") else None
    if weight_format == "plain":
        weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        return TritonLinear((out_features, in_features), dtype, bias, weight, None, "plain", None)
    if weight_format in _STORED_SHAPES:
        weight, scales = _stored(out_features, in_features, weight_format)
        return TritonLinear((out_features, in_features), dtype, bias, weight, scales, weight_format, None)
    unpacked = torch.empty(out_features, in_features, dtype=dtype, device="meta")
    weight, scales = pack_chunks(empty_quantized(unpacked, weight_format))
    return TritonLinear((out_features, in_features), dtype, bias, weight, scales, weight_format, None)


def _stored(out_features: int, in_features: int, weight_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_chunks, (num_words, num_scales, scale_dtype) = -(-in_features // 128), _STORED_SHAPES[weight_format]
    weight = torch.empty(num_chunks, out_features, num_words, dtype=torch.int16, device="meta")
    return weight, torch.empty(num_chunks, *num_scales, out_features, dtype=scale_dtype, device="meta")


_EXPERT_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "_find_tiles_kernel": ("pdl",),
    "_grouped_linear_kernel": ("wgmma", "pdl"),
    "_sum_choices_kernel": ("pdl",),
}
_EXPERT_FLOAT32_CLAIMS: dict[str, tuple[Claim, ...]] = {"_grouped_linear_kernel": ("pdl",)}
# Experts, choices, hidden size, inner size.
_MODELS = {
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "qwen3_30b_a3b": (128, 8, 2048, 768),
    "gpt_oss_120b": (128, 4, 2880, 2880),
}


def _grouped_linear_cases() -> Iterator[CompileCase]:
    """The two products of Mixtral 8x7B, Qwen3 30B A3B and gpt-oss 120B: one token, a batch, a prefill."""
    for name in ("mixtral_8x7b", "qwen3_30b_a3b"):
        for num_tokens in (1, 64, 2048):
            is_sample = (name, num_tokens) == ("qwen3_30b_a3b", 1)
            yield CompileCase(
                f"{name}_{num_tokens}_tokens_bf16", partial(_run_experts, name, num_tokens), is_sample, _EXPERT_CLAIMS
            )
    for scheme in QUANTIZATIONS:
        for num_tokens in (1, 2048):
            call = partial(_run_experts, "qwen3_30b_a3b", num_tokens, scheme)
            yield CompileCase(f"qwen3_30b_a3b_{num_tokens}_tokens_{scheme}_bf16", call, False, _EXPERT_CLAIMS)
    for name, stored in (("gpt_oss_120b", "mxfp4"), ("qwen3_30b_a3b", "fp8_block"), ("qwen3_30b_a3b", "int4_zeros")):
        for num_tokens in (1, 2048):
            call = partial(_run_experts, name, num_tokens, stored)
            yield CompileCase(f"{name}_{num_tokens}_tokens_{stored}_bf16", call, False, _EXPERT_CLAIMS)
    for num_experts in (256, 512):
        expert_ids = torch.empty(16, 8, dtype=torch.int64, device="meta")
        sort = partial(grouped_linear.group_rows, expert_ids, num_experts)
        yield CompileCase(f"{num_experts}_experts_16_tokens", sort, False, {"_find_tiles_kernel": ("pdl",)})
    call = partial(_run_experts, "qwen3_30b_a3b", 2048, "plain", torch.float32)
    yield CompileCase("qwen3_30b_a3b_2048_tokens_f32", call, False, _EXPERT_FLOAT32_CLAIMS)


def _run_experts(
    name: str, num_tokens: int, weight_format: str = "plain", dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    num_experts, num_choices, size, inner_size = _MODELS[name]
    x = torch.empty(num_tokens, size, dtype=dtype, device="meta")
    expert_ids = torch.empty(num_tokens, num_choices, dtype=torch.int64, device="meta")
    groups = grouped_linear.group_rows(expert_ids, num_experts)
    inner = _experts((num_experts, 2 * inner_size, size), weight_format, dtype)(x, groups, "silu_and_mul")
    rows = _experts((num_experts, size, inner_size), weight_format, dtype)(inner, groups)
    return grouped_linear.sum_choices(rows, torch.empty(num_tokens, num_choices, device="meta"))


def _experts(shape: tuple[int, int, int], weight_format: str, dtype: torch.dtype) -> grouped_linear.TritonExperts:
    if weight_format == "plain":
        return grouped_linear.TritonExperts(shape, torch.empty(shape, dtype=dtype, device="meta"), None, "plain")
    if weight_format in _STORED_SHAPES:
        one = _stored(*shape[1:], weight_format)
    else:
        one = pack_chunks(empty_quantized(torch.empty(shape[1:], dtype=dtype, device="meta"), weight_format))
    weight, scales = (torch.empty((shape[0], *part.shape), dtype=part.dtype, device="meta") for part in one)
    return grouped_linear.TritonExperts(shape, weight, scales, weight_format)


def _low_rank_cases() -> Iterator[CompileCase]:
    """Queries, keys and values of GPT-2, those and the embedding of Llama 8B, with adapters of rank 16 and 64."""
    for name, in_features, out_features, rank in (("gpt2_qkv", 768, 2304, 16), ("8b_qkv", 4096, 6144, 64)):
        x, y = meta_tensor(64, in_features), meta_tensor(64, out_features)
        work = partial(low_rank.add_low_rank_, y, x, _low_rank_slots(rank), 0)
        yield CompileCase(f"{name}_r{rank}_bf16", work, name == "gpt2_qkv")
    work = partial(low_rank.add_low_rank_, meta_tensor(2048, 6144), meta_tensor(2048, 4096), _low_rank_slots(64), 0)
    yield CompileCase("8b_qkv_r64_2048_rows_bf16", work)
    ids, vectors = meta_tensor(64, dtype=torch.int64), meta_tensor(64, 4096)
    embed = partial(low_rank.add_low_rank_to_embedding_, vectors, ids, _low_rank_slots(64), 0, 128256)
    yield CompileCase("8b_embedding_r64_bf16", embed, is_sample=True)


def _low_rank_slots(rank: int) -> LowRankSlots:
    slots = LowRankSlots(8, 1, 64, rank, torch.device("meta"))
    slots.host_tiles = [[slot, 8 * slot, 8] for slot in range(8)]
    return slots


CASES: dict[str, Callable[[], Iterator[CompileCase]]] = {
    "grouped_linear": _grouped_linear_cases,
    "linear": _linear_cases,
    "low_rank": _low_rank_cases,
}
