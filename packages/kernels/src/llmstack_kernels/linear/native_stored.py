"""Native linear layers over the weights of quantized checkpoints."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.composed import OrderedLinear
from llmstack_kernels.linear.native_layer import PANEL, NativeLinear, num_columns
from llmstack_kernels.linear.packed_weight import PackedWeight
from llmstack_kernels.linear.stored_weight import StoredWeight
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer
from llmstack_kernels.native.huge_pages import empty_in_huge_pages

_WEIGHT_ARGUMENTS = (Pointer, Pointer, Int, Pointer, Int)  # numbers, scales, their type, zero points or table, group
STORED = "stored_"
"""How the names of these schemes begin."""
SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeOrderedLinear(OrderedLinear):
    """A layer with permuted inputs, whose permutation is native code."""

    __slots__ = ("_native",)

    def __init__(self, inner: NativeLinear, order: torch.Tensor, native: NativeLibrary) -> None:
        """`order` is the input of each column: [in_features]."""
        super().__init__(inner, order.to(torch.int32).contiguous())
        self._inner: NativeLinear = inner
        self._native = native

    def packed_weight(self) -> PackedWeight:
        """The weight with its order."""
        return replace(self._inner.packed_weight(), order=self._order)

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        ordered = rows.new_empty(rows.shape, dtype=rows.dtype)
        name = f"gather_columns_{DTYPE_TO_SUFFIX[x.dtype]}"
        self._native.function(name, Pointer, Int, Int, Pointer, Int, Pointer)(
            rows.data_ptr(), rows.shape[0], rows.stride(0), self._order.data_ptr(), self.in_features, ordered.data_ptr()
        )
        return self._inner(ordered.view(x.shape), activation, residual, out_dtype)


def pack_stored(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, native: NativeLibrary
) -> NativeLinear | NativeOrderedLinear:
    """Packs numbers, scales and zero points; `dtype` is that of the inputs."""
    out_features, in_features = weight.shape
    bits = weight.num_bits
    num_words = num_columns(out_features) * -(-in_features * bits // 32)
    packed = empty_in_huge_pages(num_words, torch.int32)
    layout, flipped, extra = _as_native(weight)
    numbers = weight.numbers.contiguous()
    pack = native.function(f"linear_pack_stored_{bits}", Pointer, Pointer, Int, Int, Int)
    pack(numbers.data_ptr(), packed.data_ptr(), in_features, out_features, flipped)
    scales = _in_panels(weight.scales)
    kept = (packed, scales, extra)
    group_size = weight.group_size + -weight.group_size % 8  # no multiple of 8 only where all inputs are one group
    arguments = _arguments(kept, group_size)
    scheme = (f"{STORED}{layout}", _WEIGHT_ARGUMENTS)
    inner = NativeLinear((out_features, in_features), dtype, bias, kept, arguments, scheme, native)
    return in_order(inner, weight.order, native)


def stored_of_packed(packed: PackedWeight, bias: torch.Tensor | None, native: NativeLibrary) -> NativeLinear:
    """The layer over a weight that `pack_stored` packed, in the same variant, without its order."""
    scheme = (packed.scheme, _WEIGHT_ARGUMENTS)
    arguments = _arguments(packed.tensors, packed.group_size)
    return NativeLinear(packed.shape, packed.dtype, bias, packed.tensors, arguments, scheme, native)


def in_order(
    inner: NativeLinear, order: torch.Tensor | None, native: NativeLibrary
) -> NativeLinear | NativeOrderedLinear:
    """The layer whose inputs are permuted to those of `inner`; `inner` itself without an order.

    Raises:
        ValueError: The order is no permutation of the inputs.
    """
    if order is None:
        return inner
    wanted = torch.arange(inner.in_features, dtype=order.dtype)
    if not torch.equal(order.sort().values, wanted):  # native code reads where it points
        raise ValueError("the order of inputs is no permutation")
    return NativeOrderedLinear(inner, order, native)


def _arguments(kept: tuple[torch.Tensor, ...], group_size: int) -> tuple[int, ...]:
    packed, scales, extra = kept
    return packed.data_ptr(), scales.data_ptr(), SCALE_TYPES[scales.dtype], extra.data_ptr(), group_size


def _as_native(weight: StoredWeight) -> tuple[str, int, torch.Tensor]:
    """The name of the native format, the bits that change in its numbers, and its zero points or table.

    Integers get a sign, unless zero points are floats: subtracting the middle from those would round them.
    """
    if weight.table is not None:
        return weight.layout, 0, weight.table
    nothing = torch.zeros(1)
    bits, middle = weight.num_bits, 1 << (weight.num_bits - 1)
    if weight.has_float_zeros:
        return f"shifted{bits}", 0, _in_panels(weight.zero_points())
    if weight.layout == "fp8":
        return weight.layout, 0, nothing
    if weight.zeros is None:
        return f"signed{bits}", middle, nothing
    return f"int{bits}", middle, _in_panels((weight.zeros.to(torch.int16) - middle).to(torch.int8))


def _in_panels(values: torch.Tensor) -> torch.Tensor:
    """[out_features, num_groups] to [panels, num_groups, columns]."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % PANEL))
    return padded.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()
