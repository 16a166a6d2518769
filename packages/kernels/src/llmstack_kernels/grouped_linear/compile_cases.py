"""Layers of experts of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase
from llmstack_kernels.grouped_linear import triton as kernels
from llmstack_kernels.linear.configurations import CHUNK_SIZES
from llmstack_kernels.linear.packed_formats import pack_chunks
from llmstack_kernels.linear.quantization import empty_quantized

_CLAIMS: dict[str, tuple[Claim, ...]] = {
    "_find_tiles_kernel": ("pdl",),
    "_grouped_linear_kernel": ("wgmma", "pdl"),
    "_sum_choices_kernel": ("pdl",),
}
_FLOAT32_CLAIMS: dict[str, tuple[Claim, ...]] = {"_grouped_linear_kernel": ("pdl",)}
# Experts, choices, hidden size, inner size.
_MODELS = {"mixtral_8x7b": (8, 2, 4096, 14336), "qwen3_30b_a3b": (128, 8, 2048, 768)}


def cases() -> Iterator[CompileCase]:
    """The two products of Mixtral 8x7B and Qwen3 30B A3B: one token, a batch, a prefill."""
    for name in _MODELS:
        for num_tokens in (1, 64, 2048):
            is_sample = (name, num_tokens) == ("qwen3_30b_a3b", 1)
            yield CompileCase(f"{name}_{num_tokens}_tokens_bf16", partial(_run, name, num_tokens), is_sample, _CLAIMS)
    for scheme in CHUNK_SIZES:
        for num_tokens in (1, 2048):
            call = partial(_run, "qwen3_30b_a3b", num_tokens, scheme)
            yield CompileCase(f"qwen3_30b_a3b_{num_tokens}_tokens_{scheme}_bf16", call, False, _CLAIMS)
    call = partial(_run, "qwen3_30b_a3b", 2048, "plain", torch.float32)
    yield CompileCase("qwen3_30b_a3b_2048_tokens_f32", call, False, _FLOAT32_CLAIMS)


def _run(name: str, num_tokens: int, weight_format: str = "plain", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    num_experts, num_choices, size, inner_size = _MODELS[name]
    x = torch.empty(num_tokens, size, dtype=dtype, device="meta")
    expert_ids = torch.empty(num_tokens, num_choices, dtype=torch.int64, device="meta")
    groups = kernels.group_rows(expert_ids, num_experts)
    inner = _experts((num_experts, 2 * inner_size, size), weight_format, dtype)(x, groups, "silu_and_mul")
    rows = _experts((num_experts, size, inner_size), weight_format, dtype)(inner, groups)
    return kernels.sum_choices(rows, torch.empty(num_tokens, num_choices, device="meta"))


def _experts(shape: tuple[int, int, int], weight_format: str, dtype: torch.dtype) -> kernels.TritonExperts:
    if weight_format == "plain":
        return kernels.TritonExperts(shape, torch.empty(shape, dtype=dtype, device="meta"), None, "plain")
    one = pack_chunks(empty_quantized(torch.empty(shape[1:], dtype=dtype, device="meta"), weight_format))
    weight, scales = (torch.empty((shape[0], *part.shape), dtype=part.dtype, device="meta") for part in one)
    return kernels.TritonExperts(shape, weight, scales, weight_format)
