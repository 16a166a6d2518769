"""Token and position embeddings: the rows of a table for given ids."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.dispatch import implementation
from llmstack_kernels.linear import BlockWeight, PackedLinear, PackedWeight, packed_weights


def embedding(
    ids: torch.Tensor,  # [num_ids] int64
    table: torch.Tensor,  # [num_rows, size]
    addend: torch.Tensor | None = None,  # [num_ids, size]
    scale: float = 1.0,
) -> torch.Tensor:  # [num_ids, size]
    """table[ids] * scale + addend; the product is rounded to the table's type.

    Ids must lie within the table: native code does not check them.
    """
    if table.ndim != 2 or ids.ndim != 1:
        raise ValueError(f"ids must be [num_ids] and the table [num_rows, size], got {ids.shape} and {table.shape}.")
    if addend is not None and addend.shape != (ids.shape[0], table.shape[1]):
        raise ValueError(f"addend of shape {tuple(addend.shape)} does not fit {ids.shape[0]} rows of {table.shape[1]}.")
    out: torch.Tensor = implementation("embedding", table.device.type).embedding(ids, table, addend, scale)
    return out


def can_look_up_packed() -> bool:
    """Whether there is a kernel for `embedding_of_packed`: native code has one, the reference has none."""
    return hasattr(implementation("embedding", "cpu"), "embedding_of_packed")


def table_of(packed: PackedLinear) -> PackedWeight | None:
    """The weight of an output head, for `embedding_of_packed`; None where it is quantized, in parts, or of no use."""
    if not can_look_up_packed():
        return None
    weights = packed_weights(packed) or ()
    is_plain = len(weights) == 1 and weights[0].scheme == "" and weights[0].order is None
    return weights[0] if is_plain else None


def embedding_of_packed(
    ids: torch.Tensor,  # [num_ids] int64
    weight: PackedWeight,  # [num_rows, size], of `table_of`
    addend: torch.Tensor | None = None,  # [num_ids, size], of the weight's type
    scale: float = 1.0,
) -> torch.Tensor:  # [num_ids, size]
    """`embedding` from the packed weight of an output head, so that a tied table is in memory once. On a CPU."""
    _check_addend(addend, ids, weight.shape[1], weight.dtype)
    out: torch.Tensor = implementation("embedding", "cpu").embedding_of_packed(ids, weight, addend, scale)
    return out


def can_look_up_blocks() -> bool:
    """Whether there is a kernel for `embedding_of_blocks`: native code has one, the reference has none."""
    return hasattr(implementation("embedding", "cpu"), "embedding_of_blocks")


def embedding_of_blocks(
    ids: torch.Tensor,  # [num_ids] int64
    table: BlockWeight,  # [num_rows, size], as `BlockWeight.copied` returns it
    dtype: torch.dtype,
    addend: torch.Tensor | None = None,  # [num_ids, size], of this type
    scale: float = 1.0,
) -> torch.Tensor:  # [num_ids, size]
    """`embedding` from blocks of few bits, with the bits of a table that was widened to `dtype` before. On a CPU."""
    if len(table.parts) != 1 or table.outputs is not None or not table.parts[0].is_contiguous():
        raise ValueError("the table must be one part, with its rows in order.")
    _check_addend(addend, ids, table.shape[1], dtype)
    out: torch.Tensor = implementation("embedding", "cpu").embedding_of_blocks(ids, table, dtype, addend, scale)
    return out


def _check_addend(addend: torch.Tensor | None, ids: torch.Tensor, size: int, dtype: torch.dtype) -> None:
    if addend is not None and (addend.shape != (ids.shape[0], size) or addend.dtype != dtype):
        raise ValueError(f"addend of shape {tuple(addend.shape)} does not fit {ids.shape[0]} rows of {size}.")


def embedding_part(
    ids: torch.Tensor,  # [num_ids] int64
    table: torch.Tensor,  # [num_rows, size]
    first_id: int,
    scale: float = 1.0,
) -> torch.Tensor:  # [num_ids, size]
    """table[ids - first_id] * scale, and zeros for ids that the table does not have: it is a run of a larger one."""
    if table.ndim != 2 or ids.ndim != 1:
        raise ValueError(f"ids must be [num_ids] and the table [num_rows, size], got {ids.shape} and {table.shape}.")
    backend = implementation("embedding", table.device.type)
    compute = getattr(backend, "embedding_part", reference.embedding_part)  # a GPU has no kernel of its own for this
    out: torch.Tensor = compute(ids, table, first_id, scale)
    return out
