"""Norms of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.rms_norm import triton as kernels


def cases() -> Iterator[CompileCase]:
    """Hidden sizes of Llama 1B and 8B, and the heads of Qwen 3."""
    for name, size in (("1b", 2048), ("8b", 4096)):
        x, weight = _empty(64, size), _empty(size)
        call = partial(kernels.fused_add_rms_norm, x, x, weight, 1e-5)
        yield CompileCase(f"add_{name}_bf16", call, name == "8b", {"_rms_norm_kernel": ("pdl",)})
        yield CompileCase(f"{name}_bf16", partial(kernels.rms_norm, x, weight, 1e-5))
    heads = _empty(64, 48, 128)[:, :32]
    yield CompileCase("heads_128_bf16", partial(kernels.rms_norm, heads, _empty(128), 1e-5))


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
