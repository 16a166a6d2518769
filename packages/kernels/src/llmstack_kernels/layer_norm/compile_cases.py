"""Layer norms of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.layer_norm import triton as kernels


def cases() -> Iterator[CompileCase]:
    """Hidden sizes of GPT-2 and of Falcon 7B, whose norms lack power-of-two rows."""
    for name, size in (("gpt2", 768), ("falcon_7b", 4544)):
        x, weight = _empty(64, size), _empty(size)
        call = partial(kernels.layer_norm, x, weight, weight, 1e-5)
        yield CompileCase(f"{name}_bf16", call, name == "gpt2", {"_layer_norm_kernel": ("pdl",)})
        yield CompileCase(f"add_{name}_bf16", partial(kernels.fused_add_layer_norm, x, x, weight, weight, 1e-5))


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
