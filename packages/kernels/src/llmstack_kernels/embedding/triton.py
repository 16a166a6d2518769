"""Embedding on a GPU."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch

# Four loads of 16 bytes of a thread, of 16-bit numbers: they wait for the id, and make up for it together.
_MAX_BLOCK_SIZE = 4096


@triton.jit
def _embedding_kernel(
    ids,  # [num_ids]
    table,  # [num_rows, size]
    addend,  # [num_ids, size], with HAS_ADDEND
    out,  # [num_ids, size]
    size,
    scale,
    HAS_ADDEND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = column < size
    wait_for_previous()
    row = tl.load(ids + index).to(tl.int64)
    values = tl.load(table + row * size + column, mask=is_inside, other=0.0)
    # The product is rounded to the table's type, as it is where it stands alone.
    values = (values.to(tl.float32) * scale).to(table.dtype.element_ty).to(tl.float32)
    if HAS_ADDEND:
        values += tl.load(addend + index * size + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + index * size + column, values.to(out.dtype.element_ty), mask=is_inside)


def embedding(ids: torch.Tensor, table: torch.Tensor, addend: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Look up, multiply and add in one pass."""
    ids, table = ids.contiguous(), table.contiguous()
    dtype = table.dtype if addend is None else torch.promote_types(table.dtype, addend.dtype)
    addend = None if addend is None else addend.contiguous()
    num_ids, size = ids.shape[0], table.shape[1]
    out = table.new_empty((num_ids, size), dtype=dtype)
    block_size = min(triton.next_power_of_2(size), _MAX_BLOCK_SIZE)
    grid = (num_ids, triton.cdiv(size, block_size))
    constants: dict[str, Any] = {"HAS_ADDEND": addend is not None, "BLOCK_SIZE": block_size}
    constants["launch_pdl"] = supports_dependent_launch(table.device)
    launch(_embedding_kernel, grid, ids, table, addend, out, size, scale, **constants)
    return out
