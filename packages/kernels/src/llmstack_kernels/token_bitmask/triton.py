"""Token bitmask on a GPU: writes where a bit is 0, and reads no logits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels import reference
from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch

_BLOCK_SIZE = 4096


@triton.jit
def _token_bitmask_kernel(
    logits,  # [num_rows, vocab_size], rows apart by `row_stride`
    rows,  # [num_masked_rows] int64
    bits,  # [num_masked_rows, num_words] int32
    row_stride,
    vocab_size,
    num_words,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = token < vocab_size
    wait_for_previous()
    words = tl.load(bits + index * num_words + token // 32, mask=is_inside, other=-1)
    is_masked = ((words >> (token % 32)) & 1) == 0
    start = logits + tl.load(rows + index) * row_stride
    minus_infinity = tl.full([BLOCK_SIZE], float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(start + token, minus_infinity, mask=is_inside & is_masked)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """A program for some thousand tokens of a row."""
    if logits.stride(-1) != 1:
        reference.apply_token_bitmask(logits, rows, bits)
        return
    rows, bits = rows.contiguous(), bits.contiguous()
    vocab_size, num_words = logits.shape[-1], bits.shape[1]
    grid = (rows.shape[0], triton.cdiv(vocab_size, _BLOCK_SIZE))
    arguments = (logits, rows, bits, logits.stride(0), vocab_size, num_words)
    is_early = supports_dependent_launch(logits.device)
    launch(_token_bitmask_kernel, grid, *arguments, launch_pdl=is_early, BLOCK_SIZE=_BLOCK_SIZE)
