"""Rotary embeddings of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.rotary_embedding import triton as kernels


def cases() -> Iterator[CompileCase]:
    """Heads of Llama 8B and 1B, and Phi-2's, of which a part is turned."""
    for name, num_heads, num_kv_heads, head_dim, rotary_dim in (
        ("8b", 32, 8, 128, 128),
        ("1b", 32, 8, 64, 64),
        ("phi2", 32, 32, 80, 32),
    ):
        positions = torch.empty(64, dtype=torch.int64, device="meta")
        qkv = torch.empty((64, num_heads + 2 * num_kv_heads, head_dim), dtype=torch.bfloat16, device="meta")
        query, key, _ = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        table = torch.empty((8192, rotary_dim), device="meta")
        call = partial(kernels.rotary_embedding, positions, query, key, table)
        yield CompileCase(f"{name}_bf16", call, is_sample=name == "8b")
