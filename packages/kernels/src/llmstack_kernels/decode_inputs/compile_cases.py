"""Inputs of decode steps as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.decode_inputs import DecodeInputs
from llmstack_kernels.decode_inputs import triton as kernels


def cases() -> Iterator[CompileCase]:
    """256 rows of 8,192 tokens in blocks of 16."""
    num_rows, num_blocks, block_size = 256, 512, 16
    state, rows = _empty(num_rows + 1, 2 + num_blocks), _empty(num_rows)
    wide = torch.empty(num_rows, dtype=torch.int64, device="meta")
    out = DecodeInputs(wide, wide, rows, wide, _empty(num_rows, num_blocks))
    is_good = torch.empty(num_rows, dtype=torch.bool, device="meta")
    yield CompileCase("decode", partial(kernels.decode_inputs, state, rows, block_size, out), is_sample=True)
    yield CompileCase("advance", partial(kernels.advance_rows, state, rows, wide, is_good, rows), is_sample=True)
    yield CompileCase("update", partial(kernels.update_rows, state, _empty(1000, 3)), is_sample=True)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
