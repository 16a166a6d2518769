"""A native linear layer: a weight in panels of output columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.dynamic import DynamicWeight
from llmstack_kernels.linear.packed_weight import PackedWeight, SizedLinear
from llmstack_kernels.linear.reference import GATES, finish
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer
from llmstack_kernels.native.huge_pages import empty_in_huge_pages

PANEL = 64
"""Output columns that are packed together."""

_PLAIN = ("", (Pointer,))
_DYNAMIC = ("dynamic", (Pointer,) * 3)


class NativeLinear(SizedLinear):
    """A weight in panels of 64 output columns."""

    __slots__ = (
        "_argument_types",
        "_bias",
        "_bias_pointer",
        "_dtype",
        "_dtype_to_name",
        "_kept",
        "_native",
        "_row_size",
        "_scheme",
        "_weight",
    )

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        kept: tuple[torch.Tensor, ...],
        weight: tuple[int, ...],
        scheme: tuple[str, tuple[type, ...]],
        native: NativeLibrary,
    ) -> None:
        """Use `pack`.

        Args:
            shape: [out_features, in_features].
            dtype: Of the inputs.
            bias: [out_features].
            kept: Owners of the memory that `weight` points to.
            weight: Arguments of the native functions that describe the weight.
            scheme: How the weight is quantized, or "", and the types of `weight`.
            native: Where the functions are.
        """
        super().__init__(shape)
        self._row_size = _row_size(self.in_features, scheme[0])
        self._dtype = dtype
        self._bias = None if bias is None else bias.to(dtype).contiguous()
        self._bias_pointer = 0 if self._bias is None else self._bias.data_ptr()
        self._kept = kept
        self._weight = weight
        self._scheme = scheme[0]
        self._native = native
        name = "_".join(filter(None, ("linear", scheme[0], DTYPE_TO_SUFFIX[dtype])))
        self._dtype_to_name = {torch.float32: f"{name}_f32"} | {dtype: name}
        self._argument_types = (Pointer, Int, Int, *scheme[1], Int, Int, Pointer, Pointer, Pointer, Int)

    @staticmethod
    def pack(weight: torch.Tensor, bias: torch.Tensor | None, native: NativeLibrary) -> NativeLinear:
        """Packs a copy of `weight` [out_features, in_features]."""
        suffix = DTYPE_TO_SUFFIX[weight.dtype]
        out_features, in_features = weight.shape
        packed = empty_in_huge_pages(num_columns(out_features) * (in_features + in_features % 2), weight.dtype)
        _pack(native, suffix, weight.contiguous(), packed)
        shape = (out_features, in_features)
        return NativeLinear(shape, weight.dtype, bias, (packed,), (packed.data_ptr(),), _PLAIN, native)

    @staticmethod
    def pack_dynamic(
        weight: DynamicWeight, dtype: torch.dtype, bias: torch.Tensor | None, native: NativeLibrary
    ) -> NativeLinear:
        """Packs integers that rounded inputs of `dtype` are multiplied by."""
        out_features, in_features = weight.integers.shape
        packed = empty_in_huge_pages(num_columns(out_features) * (in_features + -in_features % 4), torch.uint8)
        corrections = torch.empty(num_columns(out_features), dtype=torch.int32)
        native.function("linear_pack_dynamic", Pointer, Pointer, Pointer, Int, Int)(
            weight.integers.data_ptr(), packed.data_ptr(), corrections.data_ptr(), in_features, out_features
        )
        scales = F.pad(weight.scales, (0, -out_features % PANEL))
        kept = (packed, corrections, scales)
        shape, arguments = (out_features, in_features), tuple(tensor.data_ptr() for tensor in kept)
        return NativeLinear(shape, dtype, bias, kept, arguments, _DYNAMIC, native)

    @staticmethod
    def from_packed(packed: PackedWeight, bias: torch.Tensor | None, native: NativeLibrary) -> NativeLinear:
        """The layer over a weight that `packed_weight` gave, in the same variant, and that has no groups."""
        arguments = tuple(tensor.data_ptr() for tensor in packed.tensors)
        scheme: tuple[str, tuple[type, ...]] = _PLAIN if packed.scheme == "" else _DYNAMIC
        return NativeLinear(packed.shape, packed.dtype, bias, packed.tensors, arguments, scheme, native)

    def packed_weight(self) -> PackedWeight:
        """The weight without its bias."""
        group_size = 0 if self._scheme in ("", "dynamic") else self._weight[-1]
        shape = (self.out_features, self.in_features)
        return PackedWeight(shape, self._dtype, self._scheme, group_size, self._kept)

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        if activation in GATES:
            return finish(self(x, out_dtype=out_dtype), activation, residual, out_dtype)
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        if self._row_size > self.in_features:
            rows = F.pad(rows, (0, self._row_size - self.in_features))
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        dtype = out_dtype or self._dtype
        out = x.new_empty((*x.shape[:-1], self.out_features), dtype=dtype)
        self._native.function(self._dtype_to_name[dtype], *self._argument_types)(
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            *self._weight,
            self.in_features,
            self.out_features,
            self._bias_pointer,
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            ACTIVATION_TO_CODE[activation],
        )
        return out


def _row_size(in_features: int, scheme: str) -> int:
    """Inputs of a row with those behind the last that are read with it, in pairs or for a word of 32 bits."""
    if scheme == "segments":
        return in_features
    step = 32 // int(scheme[-1]) if scheme.startswith("stored_") else 2
    return in_features + -in_features % step


def num_columns(out_features: int) -> int:
    """Columns of all panels."""
    return -(-out_features // PANEL) * PANEL


def _pack(native: NativeLibrary, suffix: str, weight: torch.Tensor, packed: torch.Tensor) -> None:
    pack = native.function(f"linear_pack_{suffix}", Pointer, Pointer, Int, Int)
    out_features, in_features = weight.shape
    pack(weight.data_ptr(), packed.data_ptr(), in_features, out_features)
