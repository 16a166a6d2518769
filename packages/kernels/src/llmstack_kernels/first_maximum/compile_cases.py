"""Greedy choices as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.first_maximum import triton as kernels


def cases() -> Iterator[CompileCase]:
    """The vocabularies of GPT-2 and Llama 3."""
    for name, size in (("gpt2", 50257), ("llama3", 128_256)):
        logits = torch.empty((64, size), device="meta")
        yield CompileCase(f"{name}_f32", partial(kernels.first_maximum, logits), is_sample=name == "llama3")
