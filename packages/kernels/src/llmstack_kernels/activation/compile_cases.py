"""Activations of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.activation import triton as kernels
from llmstack_kernels.ahead_of_time.case import CompileCase


def cases() -> Iterator[CompileCase]:
    """Feed-forward layers of Llama 8B, Gemma and GPT-2; logits that Gemma caps."""
    x = _empty(64, 2 * 14336)
    yield CompileCase("silu_and_mul_8b_bf16", partial(kernels.silu_and_mul, x), is_sample=True)
    yield CompileCase("gelu_tanh_and_mul_bf16", partial(kernels.gelu_tanh_and_mul, _empty(64, 2 * 16384)))
    for name in ("gelu_tanh", "gelu", "relu"):
        yield CompileCase(f"{name}_gpt2_bf16", partial(getattr(kernels, name), _empty(64, 3072)))
    logits = torch.empty((64, 256_000), device="meta")
    yield CompileCase("soft_cap_f32", partial(kernels.soft_cap_, logits, 30.0), is_sample=True)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
