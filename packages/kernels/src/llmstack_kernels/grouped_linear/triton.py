"""Linear layers of experts on a GPU, in one kernel.

A program computes a tile of rows that have the same expert.

Nothing is known to the host: rows are sorted and tiles are counted on the device, and there are as many programs as
tiles there may be; those without a tile end at once. The tiles are those of `linear`, so a row's bits do not depend on
the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.grouped_linear.row_groups import RowGroups
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.linear import BlockWeight, quantize
from llmstack_kernels.linear.configurations import Configuration, Tile, choose, choose_tile
from llmstack_kernels.linear.dynamic import INT8_DYNAMIC
from llmstack_kernels.linear.epilogue import activate_or_gate, tile_outputs
from llmstack_kernels.linear.packed_formats import pack_chunks, pack_stored_chunks
from llmstack_kernels.linear.product import tile_product
from llmstack_kernels.linear.reference import GATES
from llmstack_kernels.linear.stored_weight import StoredWeight

__all__ = [
    "IS_ONE_TENSOR",
    "TritonExperts",
    "group_rows",
    "pack_experts",
    "pack_stored_experts",
    "sum_choices",
]

IS_ONE_TENSOR = True

_COUNT_BLOCK = 1024
_SORT_BLOCK = 64
_MAX_SORTED_ROWS = 4096
_MAX_COMPARISONS = 1 << 17
"""Most rows, and most of these times experts, that one program puts in order: 64 tokens' with 8 of 128 experts.
With so many experts it takes some 2,000 instructions for each 64 rows (counted, not measured on a card). PyTorch sorts
more, in several launches."""
_TILE_BLOCK = 64
_MANY_EXPERTS = 256
"""From so many on, four warps have too few registers for the comparisons of a block of rows with all experts."""


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _find_tiles_kernel(
    expert_ids,  # [num_rows]
    rows,  # int64 [num_rows], written if IS_SORTING: rows by expert, those of one as they stood
    starts,  # int32 [num_experts + 1]
    tile_experts,  # int32 [num_tiles]
    tile_starts,  # int32 [num_tiles]
    num_rows,
    num_experts,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # a power of two above num_experts
    BLOCK: tl.constexpr,
    SORT_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    IS_SORTING: tl.constexpr,
):
    wait_for_previous()
    experts = tl.arange(0, NUM_EXPERTS)
    counts = tl.zeros((NUM_EXPERTS,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids + row, mask=row < num_rows, other=num_experts).to(tl.int32)
        counts += tl.histogram(ids, NUM_EXPERTS)
    counts = tl.where(experts < num_experts, counts, 0)
    first_rows = tl.cumsum(counts, 0) - counts
    tl.store(starts + experts, first_rows, mask=experts <= num_experts)
    if IS_SORTING:
        next_rows, places = first_rows, tl.arange(0, SORT_BLOCK)
        for start in range(0, num_rows, SORT_BLOCK):
            row = start + places
            ids = tl.load(expert_ids + row, mask=row < num_rows, other=num_experts).to(tl.int32)
            is_own = ids[:, None] == experts[None, :]
            is_before = (ids[:, None] == ids[None, :]) & (places[None, :] < places[:, None])
            own_next = tl.sum(tl.where(is_own, next_rows[None, :], 0), axis=1)
            tl.store(rows + own_next + tl.sum(is_before.to(tl.int32), axis=1), row.to(tl.int64), mask=row < num_rows)
            next_rows += tl.sum(is_own.to(tl.int32), axis=0)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    ends = tl.cumsum(tiles, 0)
    for start in range(0, num_tiles, TILE_BLOCK):
        tile = start + tl.arange(0, TILE_BLOCK)
        is_before = (ends[None, :] <= tile[:, None]) & (experts < num_experts)[None, :]
        expert = tl.sum(is_before.to(tl.int32), axis=1)  # those whose tiles all come before
        is_own = experts[None, :] == expert[:, None]
        own_first = tl.sum(tl.where(is_own, (first_rows - (ends - tiles) * TILE_ROWS)[None, :], 0), axis=1)
        tl.store(tile_experts + tile, expert, mask=tile < num_tiles)
        tl.store(tile_starts + tile, own_first + tile * TILE_ROWS, mask=tile < num_tiles)


@triton.jit
def _grouped_linear_kernel(
    x,  # [num_tokens or num_rows, in_features], rows `row_stride` apart
    weight,  # the experts' one after the other, see `tile_product`
    scales,
    out,  # [num_rows, num_outs], or half as many with a gate
    rows,  # int64 [num_rows]
    starts,  # int32 [num_experts + 1]
    tile_experts,  # int32 [num_tiles]
    tile_starts,  # int32 [num_tiles]
    row_stride,
    rows_per_input,
    num_experts,
    in_features,
    num_outs,
    weight_stride,  # from one expert's to the next
    scale_stride,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    tile, out_tile = tl.program_id(0), tl.program_id(1)
    wait_for_previous()
    expert = tl.load(tile_experts + tile)
    if expert < num_experts:
        places = tl.load(tile_starts + tile) + tl.arange(0, BLOCK_ROWS)
        is_row = places < tl.load(starts + expert + 1)
        row = tl.load(rows + places, mask=is_row, other=0)
        row_starts = x + row // rows_per_input * row_stride
        outs = tile_outputs(out_tile, num_outs, BLOCK_OUT, IS_GATED)
        weights = weight + expert.to(tl.int64) * weight_stride
        own_scales = scales
        if FORMAT != "plain":
            own_scales = scales + expert.to(tl.int64) * scale_stride
        sums = tile_product(
            weights, own_scales, outs, row_starts, 0, tl.cdiv(in_features, BLOCK_K), in_features, num_outs,
            FORMAT, HAS_TAIL, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        if FORMAT == "fp8":
            sums *= tl.load(own_scales + outs)[:, None]
        results = tl.trans(activate_or_gate(sums, ACTIVATION, IS_GATED))
        width = num_outs // 2 if IS_GATED else num_outs
        columns = out_tile * results.shape[1] + tl.arange(0, results.shape[1])
        is_inside = is_row[:, None] & (columns < width)[None, :]
        tl.store(out + row[:, None] * width + columns[None, :], results.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _sum_choices_kernel(
    rows,  # [num_tokens, NUM_CHOICES, size]
    shares,  # float32 [num_tokens, NUM_CHOICES]
    out,  # [num_tokens, size]
    size,
    NUM_CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_CHOICES):
        share = tl.load(shares + token * NUM_CHOICES + choice)
        own = rows + (token * NUM_CHOICES + choice) * size + columns
        width = tl.where(share != 0.0, size, 0)  # what another rank computes is not written
        row = tl.load(own, mask=columns < width, other=0.0)
        total += row.to(tl.float32) * share
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=is_inside)


class TritonExperts:
    """The weights of all experts in one tensor."""

    __slots__ = ("_configuration", "_format", "_scales", "_shape", "_weight")

    def __init__(
        self, shape: tuple[int, int, int], weight: torch.Tensor, scales: torch.Tensor | None, weight_format: str
    ) -> None:
        """Use `pack_experts`.

        Args:
            shape: [num_experts, out_features, in_features].
            weight: In the layout of the format, expert after expert.
            scales: Of the formats with scales, expert after expert.
            weight_format: One of `linear.configurations.FORMATS`.
        """
        self._shape = shape
        self._weight = weight
        self._scales = scales
        self._format = weight_format
        row_bits = 32 if weight.dtype == torch.float32 else 16
        self._configuration = choose(weight_format, shape[1], shape[2], row_bits)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self._shape[0]

    @property
    def in_features(self) -> int:
        """Length of an input row."""
        return self._shape[2]

    @property
    def out_features(self) -> int:
        """Length of an output row before a gate halves it."""
        return self._shape[1]

    def __call__(self, x: torch.Tensor, groups: RowGroups, activation: str = "none") -> torch.Tensor:
        """The outputs of all rows: [num_rows, out_features]."""
        if groups.tile_experts is None:
            raise ValueError("rows were grouped for another device than the experts'.")
        x = x if x.stride(1) == 1 else x.contiguous()
        num_experts, num_outs, in_features = self._shape
        out = x.new_empty((groups.num_rows, num_outs // 2 if activation in GATES else num_outs))
        tile = _cut_rows(groups.tile_rows, self._format, self._configuration, x.dtype)
        tensors = (x, self._weight, self._scales, out, groups.rows, groups.starts, groups.tile_experts)
        rows_per_input = groups.num_rows // max(1, x.shape[0])
        strides = (self._weight.stride(0), 0 if self._scales is None else self._scales.stride(0))
        sizes = (x.stride(0), rows_per_input, num_experts, in_features, num_outs, *strides)
        constants: dict[str, Any] = {
            "enable_fp_fusion": False,  # as in `linear`
            "launch_pdl": supports_dependent_launch(x.device),
            "FORMAT": self._format,
            "ACTIVATION": GATES.get(activation, activation),
            "IS_GATED": activation in GATES,
            "HAS_TAIL": in_features % self._configuration.block_k != 0,
            "BLOCK_OUT": tile.block_out,
            "BLOCK_ROWS": tile.block_rows,
            "BLOCK_K": self._configuration.block_k,
            "NUM_STAGES": tile.num_stages,
        }
        grid = (groups.tile_experts.shape[0], triton.cdiv(num_outs, tile.block_out))
        launch(
            _grouped_linear_kernel, grid, *tensors, groups.tile_starts, *sizes,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **constants,
        )  # fmt: skip
        return out


def pack_experts(
    weights: torch.Tensor, quantization: str | None = None, is_batch_invariant: bool = False
) -> TritonExperts:
    """Keep the weights, or round and pack them; batch-invariant always.

    Raises:
        ValueError: The kernels of experts do not round inputs.
    """
    if quantization == INT8_DYNAMIC:
        raise ValueError(f"{INT8_DYNAMIC} is not computed for experts on a GPU; int8 rounds their weights alone.")
    shape = (weights.shape[0], weights.shape[1], weights.shape[2])
    if quantization is None:
        return TritonExperts(shape, weights.contiguous(), None, "plain")
    if weights.dtype == torch.float32:
        widened = [quantize(weight, quantization).dequantize(torch.float32) for weight in weights]
        return TritonExperts(shape, torch.stack(widened), None, "plain")
    packed = [pack_chunks(quantize(weight, quantization)) for weight in weights]
    stacked = (torch.stack([weight for weight, _ in packed]), torch.stack([scales for _, scales in packed]))
    return TritonExperts(shape, *stacked, quantization)


def pack_stored_experts(
    weights: Sequence[StoredWeight | BlockWeight], dtype: torch.dtype, device: torch.device
) -> TritonExperts | None:
    """Pack what the kernels read as it stands, one expert after another on the device.

    The numbers of blocks are in memory for one expert at a time: those of a layer may be gigabytes.
    """
    weight_format, wholes = "", list[torch.Tensor]()
    for place, weight in enumerate(weights):
        packed = _pack_stored(weight, dtype, device)
        if packed is None:
            return None
        own_format, *parts = packed
        if not place:
            weight_format = own_format
            wholes = [part.new_empty((len(weights), *part.shape)) for part in parts]
        if own_format != weight_format or weight.shape != weights[0].shape:
            return None
        for whole, part in zip(wholes, parts, strict=True):
            whole[place] = part
    numbers, scales = wholes
    return TritonExperts((len(weights), *weights[0].shape), numbers, scales, weight_format)


def _pack_stored(
    weight: StoredWeight | BlockWeight, dtype: torch.dtype, device: torch.device
) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    numbers = weight.stored() if isinstance(weight, BlockWeight) else weight
    return pack_stored_chunks(numbers.to(device)) if numbers.order is None else None


def group_rows(expert_ids: torch.Tensor, num_experts: int) -> RowGroups:
    """Sort rows by expert and cut each expert's into tiles; one kernel does both where rows are few."""
    num_tokens, num_choices = expert_ids.shape
    flat = expert_ids.reshape(-1)
    num_rows, device = flat.shape[0], flat.device
    num_compared = triton.next_power_of_2(num_experts + 1)
    is_sorting = num_rows <= min(_MAX_SORTED_ROWS, _MAX_COMPARISONS // num_compared)
    rows = torch.empty(num_rows, dtype=torch.int64, device=device) if is_sorting else torch.sort(flat, stable=True)[1]
    tile_rows = choose_tile_rows(num_rows, num_experts)
    num_tiles = min(num_experts, num_rows) + num_rows // tile_rows  # each expert has one tile that is not full at most
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tile_experts, tile_starts = torch.empty((2, num_tiles), dtype=torch.int32, device=device)
    launch(
        _find_tiles_kernel, (1,), flat, rows, starts, tile_experts, tile_starts, num_rows, num_experts, num_tiles,
        TILE_ROWS=tile_rows, NUM_EXPERTS=num_compared, BLOCK=_COUNT_BLOCK,
        SORT_BLOCK=_SORT_BLOCK, TILE_BLOCK=_TILE_BLOCK, IS_SORTING=is_sorting,
        num_warps=8 if num_experts >= _MANY_EXPERTS else 4, launch_pdl=supports_dependent_launch(device),
    )  # fmt: skip
    return RowGroups(rows, starts, num_tokens, num_choices, tile_experts, tile_starts, tile_rows)


def choose_tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a tile, by how many an expert has on average."""
    average = -(-num_rows // num_experts)
    return next((rows for rows in (16, 32) if rows >= average), 64)


def sum_choices(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """One choice after the other."""
    num_tokens, num_choices = shares.shape
    out = rows.new_empty((num_tokens, rows.shape[1]))
    block = min(1024, triton.next_power_of_2(rows.shape[1]))
    grid = (num_tokens, triton.cdiv(rows.shape[1], block))
    constants: dict[str, Any] = {"NUM_CHOICES": num_choices, "BLOCK": block}
    constants["launch_pdl"] = supports_dependent_launch(rows.device)
    launch(_sum_choices_kernel, grid, rows.contiguous(), shares.contiguous(), out, rows.shape[1], **constants)
    return out


def _cut_rows(tile_rows: int, weight_format: str, cut: Configuration, dtype: torch.dtype) -> Tile:
    """A tile for exactly so many rows; of 16-bit weights twice as wide where rows are many."""
    tile = choose_tile(cut, weight_format, tile_rows, 8 * dtype.itemsize)
    if weight_format == "plain" and tile_rows == 64 and dtype != torch.float32:
        return Tile(block_out=128, block_rows=tile_rows, num_stages=4, num_warps=8)
    return Tile(tile.block_out, tile_rows, tile.num_stages, tile.num_warps)
