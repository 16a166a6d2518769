"""Low-rank updates in native code."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmstack_kernels.low_rank import reference
from llmstack_kernels.low_rank.slots import MAX_PARTS, ExpertRows, LowRankSlots
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Int, Pointer, require_library

_ARGUMENTS = (Pointer, Int, Int, Pointer, Int, Pointer, Int, Pointer, Pointer, Pointer, Pointer, Int)
_EMBEDDING_ARGUMENTS = (Pointer, Int, Pointer, Int, Pointer, Int, Pointer, Pointer, Pointer, Pointer, Int)


def add_low_rank_(y: torch.Tensor, x: torch.Tensor, slots: LowRankSlots | ExpertRows, layer: int) -> None:
    """Adds the updates; a captured call reads the tiles again when it is replayed."""
    if x.dtype not in DTYPE_TO_SUFFIX:
        reference.add_low_rank_(y, x, slots, layer)
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    name = f"low_rank_add_{DTYPE_TO_SUFFIX[x.dtype]}"
    if y.dtype != x.dtype:
        name += "_f32"
    inputs = (x.data_ptr(), x.stride(0), x.shape[1])
    _add(require_library().function(name, *_ARGUMENTS), inputs, len(x), y, slots, layer)


def add_low_rank_to_embedding_(
    y: torch.Tensor, ids: torch.Tensor, slots: LowRankSlots, layer: int, num_ids: int
) -> None:
    """Adds the updates; a captured call reads ids and tiles again when it is replayed."""
    if y.dtype not in DTYPE_TO_SUFFIX:
        reference.add_low_rank_to_embedding_(y, ids, slots, layer, num_ids)
        return
    name = f"low_rank_add_to_embedding_{DTYPE_TO_SUFFIX[y.dtype]}"
    function = require_library().function(name, *_EMBEDDING_ARGUMENTS)
    _add(function, (ids.data_ptr(), num_ids), len(y), y, slots, layer)


def _add(
    function: Callable[..., None],
    inputs: tuple[int, ...],
    num_rows: int,
    y: torch.Tensor,
    slots: LowRankSlots | ExpertRows,
    layer: int,
) -> None:
    """Calls `function` with its inputs, `num_rows` of them, the outputs `y` and the adapters of a layer."""
    max_rank, words = slots.max_rank_of(layer), slots.words_of(layer)
    reduced = y.new_empty((num_rows, MAX_PARTS, max_rank), dtype=torch.float32)
    function(
        *inputs, y.data_ptr(), y.shape[1], words.data_ptr(), words.stride(0), slots.rows.data_ptr(),
        slots.tiles.data_ptr(), slots.num_tiles.data_ptr(), reduced.data_ptr(), max_rank,
    )  # fmt: skip


def activate_rounded(x: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """The activation of a linear layer's epilogue, and its rounding."""
    if dtype not in DTYPE_TO_SUFFIX:
        return reference.activate_rounded(x, activation, dtype)
    out = x.new_empty(x.shape, dtype=dtype)
    size = x.shape[-1]
    function = require_library().function(
        f"low_rank_activate_{DTYPE_TO_SUFFIX[dtype]}", Pointer, Pointer, Int, Int, Int
    )
    function(x.data_ptr(), out.data_ptr(), x.numel() // size if size else 0, size, ACTIVATION_TO_CODE[activation])
    return out
