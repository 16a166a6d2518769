"""Embeddings of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.embedding import triton as kernels


def cases() -> Iterator[CompileCase]:
    """Tokens and positions of GPT-2, tokens of Llama 8B."""
    ids = torch.empty(64, dtype=torch.int64, device="meta")
    positions, tokens = _empty(1024, 768), _empty(64, 768)
    yield CompileCase("add_gpt2_bf16", partial(kernels.embedding, ids, positions, tokens, 1.0))
    yield CompileCase("8b_bf16", partial(kernels.embedding, ids, _empty(128_256, 4096), None, 1.0), is_sample=True)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
