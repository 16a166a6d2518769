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
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MIDDLE = 128  # what numbers of int8 with a sign are stored plus
_FP8_FACTOR = 256.0
"""What kernels divide numbers of fp8 by; the scales make up for it, exactly."""


class NativeOrderedLinear(OrderedLinear):
    """The same with native code for the permutation."""

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
    num_weights = num_columns(out_features) * (in_features + in_features % 2)
    has_four_bits = weight.layout in ("int4", "table4")
    packed = empty_in_huge_pages(num_weights // 2 if has_four_bits else num_weights, torch.uint8)
    is_signed = weight.layout == "int8" and weight.zeros is None
    layout = "signed8" if is_signed else weight.layout
    if weight.has_float_zeros:
        layout = "shifted4" if has_four_bits else "shifted8"
    pack = native.function(f"linear_pack_stored_{layout}_{DTYPE_TO_SUFFIX[dtype]}", Pointer, Pointer, Int, Int)
    numbers = (weight.numbers ^ _MIDDLE if is_signed else weight.numbers).contiguous()
    pack(numbers.data_ptr(), packed.data_ptr(), in_features, out_features)
    own_scales = weight.scales.float() * _FP8_FACTOR if weight.layout == "fp8" else weight.scales
    scales = _in_panels(own_scales)
    extra = weight.table if weight.table is not None else _in_panels(weight.zero_points())
    kept = (packed, scales, extra)
    group_size = weight.group_size + weight.group_size % 2  # odd only where all inputs are one group
    arguments = _arguments(kept, group_size)
    scheme = (f"{STORED}{layout}", _WEIGHT_ARGUMENTS)
    inner = NativeLinear((out_features, in_features), dtype, bias, kept, arguments, scheme, native)
    return inner if weight.order is None else NativeOrderedLinear(inner, weight.order, native)


def stored_of_packed(
    packed: PackedWeight, bias: torch.Tensor | None, native: NativeLibrary
) -> NativeLinear | NativeOrderedLinear:
    """The layer over a weight that `pack_stored` packed, in the same variant.

    Raises:
        ValueError: Its order is no permutation of the inputs.
    """
    scheme = (packed.scheme, _WEIGHT_ARGUMENTS)
    arguments = _arguments(packed.tensors, packed.group_size)
    inner = NativeLinear(packed.shape, packed.dtype, bias, packed.tensors, arguments, scheme, native)
    if packed.order is None:
        return inner
    wanted = torch.arange(packed.shape[1], dtype=torch.int32)
    if not torch.equal(packed.order.sort().values, wanted):  # native code reads where it points
        raise ValueError("the order of inputs is no permutation")
    return NativeOrderedLinear(inner, packed.order, native)


def _arguments(kept: tuple[torch.Tensor, ...], group_size: int) -> tuple[int, ...]:
    packed, scales, extra = kept
    return packed.data_ptr(), scales.data_ptr(), _SCALE_TYPES[scales.dtype], extra.data_ptr(), group_size


def _in_panels(values: torch.Tensor) -> torch.Tensor:
    """[out_features, num_groups] to [panels, num_groups, columns]."""
    padded = F.pad(values, (0, 0, 0, -values.shape[0] % PANEL))
    return padded.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()
