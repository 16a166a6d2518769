"""Token bitmasks as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.token_bitmask import triton as kernels


def cases() -> Iterator[CompileCase]:
    """The vocabularies of GPT-2 and Llama 3."""
    for name, size in (("gpt2", 50257), ("llama3", 128_256)):
        logits, rows = torch.empty((64, size), device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
        bits = torch.empty((8, -(-size // 32)), dtype=torch.int32, device="meta")
        call = partial(kernels.apply_token_bitmask, logits, rows, bits)
        yield CompileCase(f"{name}_f32", call, is_sample=name == "llama3")
