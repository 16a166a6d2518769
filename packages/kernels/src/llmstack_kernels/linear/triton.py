"""Linear layers on a GPU: a streaming kernel, or PyTorch's product for many rows.

The kernel reads a weight once for up to 64 rows.

A layer packed batch-invariant takes the kernel for any number of rows, and so does one with packed integers up to
`_MAX_QUANTIZED_ROWS`. The kernel sums an output of a row in an order that the layer's shape alone decides: blocks of
inputs one after another, in `split_k` parts, which are added in order. Where there are few rows, each part is a
program's, and the last program of a tile to be done adds them: no floating-point number is added atomically.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.linear.composed import OrderedLinear
from llmstack_kernels.linear.configurations import CHUNK_SIZES, MAX_SPLIT_ROWS, Configuration, choose, choose_tile
from llmstack_kernels.linear.dynamic import INT8_DYNAMIC
from llmstack_kernels.linear.epilogue import store_outputs, tile_outputs
from llmstack_kernels.linear.packed_formats import pack_chunks, pack_stored_chunks
from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.product import prefetch, tile_product
from llmstack_kernels.linear.quantization import QUANTIZATIONS, QuantizedWeight, quantize
from llmstack_kernels.linear.reference import GATES, PlainLinear, finish
from llmstack_kernels.linear.stored_weight import StoredWeight
from llmstack_kernels.linear.triton_dynamic import pack_dynamic_linear
from llmstack_kernels.linear.widening import numbers_of_word, unpack_chunk

__all__ = [
    "QUANTIZED_DTYPES",
    "STORED_DTYPES",
    "TritonLinear",
    "check_rows_independent",
    "pack_dynamic_linear",
    "pack_linear",
    "pack_quantized_linear",
    "pack_stored_linear",
    "quantize",
]

_HALF_DTYPES = (torch.float16, torch.bfloat16)
QUANTIZED_DTYPES = dict.fromkeys(QUANTIZATIONS, _HALF_DTYPES) | {INT8_DYNAMIC: (torch.float32, *_HALF_DTYPES)}
STORED_DTYPES = dict.fromkeys(("int8", "int4", "fp8"), _HALF_DTYPES)

_MAX_STREAMED_ROWS = 64
"""Up to so many rows a 16-bit weight is the kernel's: it is bound by reading the weight, which it reads once."""

_MAX_QUANTIZED_ROWS = 512
"""Up to so many rows integers are widened tile by tile, for 64 rows each time, at about half of the tensor cores' rate.

With more, widening the weight once per call costs less: it moves 5 bytes per weight (1.2 ps at 4.3 TB/s), and the
other half of the rate is 1.3 ps per weight at 512 rows.
"""


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [num_rows, in_features], rows `row_stride` apart
    weight,  # see `tile_product`
    scales,
    bias,  # [num_outs], with HAS_BIAS
    residual,  # [num_rows, num_outs], with HAS_RESIDUAL; half as many outputs with a gate
    out,  # like residual
    partials,  # float32 [num_tiles, SPLIT_K, BLOCK_ROWS, BLOCK_OUT], with IS_SPLIT_APART
    tickets,  # int32 [num_tiles], zeros before and after, with IS_SPLIT_APART
    num_rows,
    row_stride,
    in_features,
    num_outs,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IS_SPLIT_APART: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row_tile, out_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    outs = tile_outputs(out_tile, num_outs, BLOCK_OUT, IS_GATED)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_starts = x + tl.minimum(rows, num_rows - 1).to(tl.int64) * row_stride
    num_chunks, num_splits = tl.cdiv(in_features, BLOCK_K), tl.num_programs(2)
    first = split * tl.cdiv(num_chunks, num_splits)
    prefetch(weight, outs, first, in_features, num_outs, FORMAT, BLOCK_K)
    wait_for_previous()
    if IS_SPLIT_APART:
        last = tl.minimum(first + tl.cdiv(num_chunks, num_splits), num_chunks)
        sums = tile_product(
            weight, scales, outs, row_starts, first, last, in_features, num_outs, FORMAT, HAS_TAIL, BLOCK_K, NUM_STAGES
        )
        tile = out_tile * tl.num_programs(0) + row_tile
        is_row = (rows < num_rows)[None, :]
        sums, is_last = _add_parts(sums, is_row, tile, split, partials, tickets, SPLIT_K, BLOCK_OUT, BLOCK_ROWS)
    else:
        is_last = True
        sums = _sum_splits(
            weight, scales, outs, row_starts, num_chunks, in_features, num_outs,
            FORMAT, HAS_TAIL, SPLIT_K, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
    if is_last:
        store_outputs(
            sums, outs, rows, out_tile, scales, bias, residual, out, num_rows, num_outs,
            FORMAT, ACTIVATION, IS_GATED, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _add_parts(
    sums, is_row, tile, split, partials, tickets,
    SPLIT_K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Leaves a part for the last program of its tile to be done; that one gets the sum of all, in order, and True."""
    SIZE: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
    UNROLL: tl.constexpr = 128 // BLOCK_ROWS  # as many loads at once as registers allow: a trip to memory each time
    places = tl.arange(0, BLOCK_ROWS)[None, :] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    parts = partials + tile.to(tl.int64) * (SPLIT_K * SIZE) + places
    tl.store(parts + split * SIZE, sums, mask=is_row)
    # All threads have stored before one takes the ticket; who takes the last one sees what all have stored.
    tl.debug_barrier()
    is_last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        for part in tl.range(0, SPLIT_K, loop_unroll_factor=UNROLL):
            sums += tl.load(parts + part * SIZE, mask=is_row, other=0.0, cache_modifier=".cg")
        tl.store(tickets + tile, 0)
    return sums, is_last


@triton.jit
def _sum_splits(
    weight, scales, outs, row_starts, num_chunks, in_features, num_outs,
    FORMAT: tl.constexpr, HAS_TAIL: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sum that separate programs would compute, and the last of them add: [BLOCK_OUT, BLOCK_ROWS]."""
    if SPLIT_K == 1:
        return tile_product(
            weight, scales, outs, row_starts, 0, num_chunks, in_features, num_outs,
            FORMAT, HAS_TAIL, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
    sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
    for split in range(SPLIT_K):
        first = split * tl.cdiv(num_chunks, SPLIT_K)
        last = tl.minimum(first + tl.cdiv(num_chunks, SPLIT_K), num_chunks)
        sums += tile_product(
            weight, scales, outs, row_starts, first, last, in_features, num_outs, FORMAT, HAS_TAIL, BLOCK_K, NUM_STAGES
        )
    return sums


@triton.jit
def _widen_kernel(
    weight,  # [num_chunks, num_outs, words]
    scales,
    out,  # [num_outs, in_features]
    in_features,
    num_outs,
    FORMAT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    chunk, outs = tl.program_id(0), tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    outs = tl.minimum(outs, num_outs - 1)
    NUM_PARTS: tl.constexpr = numbers_of_word(FORMAT)
    NUM_WORDS: tl.constexpr = BLOCK_K // NUM_PARTS
    places = tl.arange(0, NUM_WORDS)
    words = tl.load(weight + chunk.to(tl.int64) * num_outs * NUM_WORDS + outs[:, None] * NUM_WORDS + places[None, :])
    dtype: tl.constexpr = out.dtype.element_ty
    starts = out + outs.to(tl.int64)[:, None] * in_features
    parts, factors = unpack_chunk(words, scales, chunk, outs, num_outs, FORMAT, dtype)
    for part in tl.static_range(NUM_PARTS):
        wide = parts[part]
        if FORMAT != "int4":
            wide = (wide.to(tl.float32) * factors[part][:, None]).to(dtype)
        inputs = chunk * BLOCK_K + part * NUM_WORDS + places
        tl.store(starts + inputs[None, :], wide, mask=(inputs < in_features)[None, :])


class TritonLinear(SizedLinear):
    """A weight for the kernel above, and for PyTorch's product where there are many rows.

    One layer must not run in two streams at once: its programs count each other.
    """

    __slots__ = (
        "_bias",
        "_configuration",
        "_dtype",
        "_format",
        "_max_rows",
        "_scales",
        "_tickets",
        "_weight",
    )

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        weight_format: str,
        max_rows: int | None,
        configuration: Configuration | None = None,
    ) -> None:
        """Use `pack_linear` and `pack_quantized_linear`.

        Args:
            shape: [out_features, in_features].
            dtype: Of the inputs.
            bias: [out_features].
            weight: In the layout of the format.
            scales: Of the formats with scales.
            weight_format: One of `configurations.FORMATS`.
            max_rows: With more rows PyTorch's product is used; None means never.
            configuration: Tiles of the layer; by default those of `configurations.choose`.
        """
        super().__init__(shape)
        self._dtype = dtype
        self._bias = None if bias is None else bias.to(dtype).contiguous()
        self._weight = weight
        self._scales = scales
        self._format = weight_format
        self._max_rows = max_rows
        self._configuration = configuration or choose(weight_format, *shape, 8 * dtype.itemsize)
        num_tickets = MAX_SPLIT_ROWS // 16 * triton.cdiv(shape[0], self._configuration.block_out)
        has_tickets = self._configuration.split_k > 1
        self._tickets = torch.zeros(num_tickets, dtype=torch.int32, device=weight.device) if has_tickets else None

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if self._max_rows is not None and rows.shape[0] > self._max_rows:
            out = self._multiply(rows, out_dtype).view(*x.shape[:-1], self.out_features)
            return finish(out, activation, residual, out_dtype)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        width = self.out_features // 2 if activation in GATES else self.out_features
        out = x.new_empty((*x.shape[:-1], width), dtype=out_dtype or self._dtype)
        self._launch(rows, activation, residual, out)
        return out

    def widen(self) -> torch.Tensor:
        """The weight [out_features, in_features] in the type of the inputs; a new tensor if it is quantized."""
        if self._format == "plain":
            return self._weight
        out = torch.empty((self.out_features, self.in_features), dtype=self._dtype, device=self._weight.device)
        grid = (self._weight.shape[0], triton.cdiv(self.out_features, 64))
        arguments = (self._weight, self._scales, out, self.in_features, self.out_features)
        block_k = CHUNK_SIZES[self._format]
        launch(_widen_kernel, grid, *arguments, FORMAT=self._format, BLOCK_OUT=64, BLOCK_K=block_k)
        return out

    def _multiply(self, rows: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        """PyTorch's product; where the output is float32, no number of 16 bits is between."""
        if out_dtype == torch.float32 and self._dtype in _HALF_DTYPES and rows.is_cuda:
            out = torch.mm(rows, self.widen().t(), out_dtype=torch.float32)
            return out if self._bias is None else out + self._bias
        return F.linear(rows, self.widen(), self._bias)

    def _launch(self, rows: torch.Tensor, activation: str, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        cut, num_rows = self._configuration, rows.shape[0]
        tile = choose_tile(cut, self._format, num_rows, 8 * self._dtype.itemsize)
        row_tiles, out_tiles = triton.cdiv(num_rows, tile.block_rows), triton.cdiv(self.out_features, tile.block_out)
        is_apart = cut.split_k > 1 and num_rows <= MAX_SPLIT_ROWS
        partials = None
        if is_apart:
            num_partials = row_tiles * out_tiles * cut.split_k * tile.block_rows * tile.block_out
            partials = torch.empty(num_partials, dtype=torch.float32, device=rows.device)
        constants: dict[str, Any] = {
            # Where products and sums are fused is not left to the compiler, which sees another program per tile.
            "enable_fp_fusion": False,
            "FORMAT": self._format,
            "ACTIVATION": GATES.get(activation, activation),
            "IS_GATED": activation in GATES,
            "HAS_BIAS": self._bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_TAIL": self.in_features % cut.block_k != 0,
            "SPLIT_K": cut.split_k,
            "IS_SPLIT_APART": is_apart,
            "BLOCK_OUT": tile.block_out,
            "BLOCK_ROWS": tile.block_rows,
            "BLOCK_K": cut.block_k,
            "NUM_STAGES": tile.num_stages,
            "launch_pdl": supports_dependent_launch(rows.device),
        }
        tensors = (rows, self._weight, self._scales, self._bias, residual, out, partials, self._tickets)
        sizes = (num_rows, rows.stride(0), self.in_features, self.out_features)
        grid = (row_tiles, out_tiles, cut.split_k if is_apart else 1)
        launch(
            _linear_kernel, grid, *tensors, *sizes, num_warps=tile.num_warps, num_stages=tile.num_stages, **constants,
        )  # fmt: skip


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> TritonLinear | PlainLinear:
    """Keep the weight as it is; float32 is PyTorch's product's unless rows must not depend on their number."""
    if weight.dtype not in _HALF_DTYPES and not is_batch_invariant:
        return PlainLinear(weight, bias)
    max_rows = None if is_batch_invariant else _MAX_STREAMED_ROWS
    shape = (weight.shape[0], weight.shape[1])
    return TritonLinear(shape, weight.dtype, bias, weight.contiguous(), None, "plain", max_rows)


def pack_quantized_linear(
    quantized: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> TritonLinear | PlainLinear:
    """Pack the integers in chunks; for inputs of float32 the weight is widened again."""
    if dtype not in QUANTIZED_DTYPES[quantized.scheme]:
        return pack_linear(quantized.dequantize(dtype), bias, is_batch_invariant)
    max_rows = None if is_batch_invariant else _MAX_QUANTIZED_ROWS
    weight, scales = pack_chunks(quantized)
    shape = (quantized.integers.shape[0], quantized.integers.shape[1])
    return TritonLinear(shape, dtype, bias, weight, scales, quantized.scheme, max_rows)


def pack_stored_linear(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> TritonLinear | OrderedLinear | PlainLinear:
    """Pack in chunks what the kernels read as it stands; other layouts, group sizes and types are widened."""
    packed = pack_stored_chunks(weight) if dtype in _HALF_DTYPES else None
    if packed is None:
        return pack_linear(weight.dequantize(dtype), bias, is_batch_invariant)
    max_rows = None if is_batch_invariant else _MAX_QUANTIZED_ROWS
    weight_format, numbers, scales = packed
    shape = (weight.shape[0], weight.shape[1])
    layer = TritonLinear(shape, dtype, bias, numbers, scales, weight_format, max_rows)
    return layer if weight.order is None else OrderedLinear(layer, weight.order)


def check_rows_independent(packed: TritonLinear, x: torch.Tensor) -> list[int]:
    """Numbers of rows for which the first rows of `x` [num_rows, in_features] come out otherwise than in the whole.

    Empty where the layer is batch-invariant on this card. That one instruction rounds alike in tiles of all widths is
    a property of the hardware, which only such a run shows.
    """
    whole = packed(x)
    counts = [count for count in (1, 2, 7, 8, 16, 17, 32, 33, 64, 65, 128, 256) if count < x.shape[0]]
    return [count for count in counts if not torch.equal(packed(x[:count]), whole[:count])]
