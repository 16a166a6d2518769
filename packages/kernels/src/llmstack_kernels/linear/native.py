"""Linear layers in native code, bit-equal for any number of rows.

Measured (one core, AVX-512 with bfloat16): level with oneDNN's packed weights from 32 rows up, 1.3 times as fast at 8
rows and twice at one, where oneDNN computes two; and bias, activation and residual cost no pass of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear import quantization
from llmstack_kernels.linear.quantization import QuantizedWeight
from llmstack_kernels.linear.reference import GATES, PlainLinear, finish
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer, library
from llmstack_kernels.native.huge_pages import empty_in_huge_pages

_PANEL = 64  # output columns that are packed together
_WEIGHT_ARGUMENTS = (Pointer,)
_QUANTIZED_WEIGHT_ARGUMENTS = (Pointer, Pointer, Int)  # integers, scales, group size
_QUANTIZE_ARGUMENTS = (Pointer, Int, Int, Int, Int, Int, Pointer, Int, Pointer, Pointer)
QUANTIZED_DTYPES = dict.fromkeys(("int8", "int4"), (torch.float32, torch.bfloat16))


class NativeLinear:
    """A weight in panels of 64 output columns."""

    __slots__ = (
        "_argument_types",
        "_bias",
        "_bias_pointer",
        "_dtype",
        "_dtype_to_name",
        "_in_features",
        "_kept",
        "_native",
        "_out_features",
        "_weight",
    )

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        kept: tuple[torch.Tensor, ...],
        weight: tuple[int, ...],
        scheme: str,
        native: NativeLibrary,
    ) -> None:
        """Use `pack` and `pack_quantized`.

        Args:
            shape: [out_features, in_features].
            dtype: Of the inputs.
            bias: [out_features].
            kept: Owners of the memory that `weight` points to.
            weight: Arguments of the native functions that describe the weight.
            scheme: How the weight is quantized, or "".
            native: Where the functions are.
        """
        self._out_features, self._in_features = shape
        self._dtype = dtype
        self._bias = None if bias is None else bias.to(dtype).contiguous()
        self._bias_pointer = 0 if self._bias is None else self._bias.data_ptr()
        self._kept = kept
        self._weight = weight
        self._native = native
        name = "_".join(filter(None, ("linear", scheme, DTYPE_TO_SUFFIX[dtype])))
        self._dtype_to_name = {torch.float32: f"{name}_f32"} | {dtype: name}
        weight_types = _QUANTIZED_WEIGHT_ARGUMENTS if scheme else _WEIGHT_ARGUMENTS
        self._argument_types = (Pointer, Int, Int, *weight_types, Int, Int, Pointer, Pointer, Pointer, Int)

    @staticmethod
    def pack(weight: torch.Tensor, bias: torch.Tensor | None, native: NativeLibrary) -> NativeLinear:
        """Packs a copy of `weight` [out_features, in_features]."""
        suffix = DTYPE_TO_SUFFIX[weight.dtype]
        out_features, in_features = weight.shape
        packed = empty_in_huge_pages(_num_columns(out_features) * (in_features + in_features % 2), weight.dtype)
        _pack(native, suffix, weight.contiguous(), packed)
        shape = (out_features, in_features)
        return NativeLinear(shape, weight.dtype, bias, (packed,), (packed.data_ptr(),), "", native)

    @staticmethod
    def pack_quantized(
        quantized: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None, native: NativeLibrary
    ) -> NativeLinear:
        """Packs the integers; `dtype` is that of the inputs: float32 or bfloat16."""
        out_features, in_features = quantized.integers.shape
        num_weights = _num_columns(out_features) * (in_features + in_features % 2)
        packed = empty_in_huge_pages(num_weights // 2 if quantized.scheme == "int4" else num_weights, torch.uint8)
        _pack(native, f"{quantized.scheme}_{DTYPE_TO_SUFFIX[dtype]}", quantized.integers, packed)
        scales = F.pad(quantized.scales, (0, 0, 0, -out_features % _PANEL))
        scales = scales.view(-1, _PANEL, scales.shape[1]).transpose(1, 2).contiguous()  # [panels, groups, columns]
        weight = (packed.data_ptr(), scales.data_ptr(), quantized.group_size)
        shape = (out_features, in_features)
        return NativeLinear(shape, dtype, bias, (packed, scales), weight, quantized.scheme, native)

    @property
    def in_features(self) -> int:
        """Length of an input row."""
        return self._in_features

    @property
    def out_features(self) -> int:
        """Length of an output row."""
        return self._out_features

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
        rows = x if x.ndim == 2 else x.reshape(-1, self._in_features)
        if self._in_features % 2:
            rows = F.pad(rows, (0, 1))  # inputs are read in pairs
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        dtype = out_dtype or self._dtype
        out = x.new_empty((*x.shape[:-1], self._out_features), dtype=dtype)
        self._native.function(self._dtype_to_name[dtype], *self._argument_types)(
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            *self._weight,
            self._in_features,
            self._out_features,
            self._bias_pointer,
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            ACTIVATION_TO_CODE[activation],
        )
        return out


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> NativeLinear | PlainLinear:
    """Pack, batch-invariant always; types that no processor computes linear layers in stay as they are."""
    native = library()
    if native is None or weight.dtype not in DTYPE_TO_SUFFIX:
        return PlainLinear(weight, bias)
    return NativeLinear.pack(weight, bias, native)


def pack_quantized_linear(
    quantized: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> NativeLinear | PlainLinear:
    """Pack; `fp8`, and any scheme for inputs of other types than float32 and bfloat16, is widened again."""
    native = library()
    if native is None or dtype not in QUANTIZED_DTYPES.get(quantized.scheme, ()):
        return pack_linear(quantized.dequantize(dtype), bias)
    return NativeLinear.pack_quantized(quantized, dtype, bias, native)


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round to integers of `scheme`, in one pass."""
    native = library()
    if native is None or weight.dtype not in DTYPE_TO_SUFFIX or scheme not in QUANTIZED_DTYPES:
        return quantization.quantize(weight, scheme)
    return quantize_by(native, weight, scheme)


def quantize_by(native: NativeLibrary, weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """The same with the given library; for each group a scale that is as good as PyTorch's choice."""
    rounding, quantized = quantization.find_scheme(scheme), quantization.empty_quantized(weight, scheme)
    factors = torch.tensor([share / rounding.largest for share in rounding.shares])
    rows = weight.contiguous()
    function = native.function(f"quantize_{DTYPE_TO_SUFFIX[weight.dtype]}", *_QUANTIZE_ARGUMENTS)
    function(
        rows.data_ptr(),
        *rows.shape,
        rounding.group_size,
        rounding.lowest,
        rounding.largest,
        factors.data_ptr(),
        len(factors),
        quantized.integers.data_ptr(),
        quantized.scales.data_ptr(),
    )
    return quantized


def is_available() -> bool:
    """True when a library was built for this processor."""
    return library() is not None


def describe() -> str:
    """The variant that runs."""
    return str(library())


def _num_columns(out_features: int) -> int:
    return -(-out_features // _PANEL) * _PANEL


def _pack(native: NativeLibrary, suffix: str, weight: torch.Tensor, packed: torch.Tensor) -> None:
    pack = native.function(f"linear_pack_{suffix}", Pointer, Pointer, Int, Int)
    out_features, in_features = weight.shape
    pack(weight.data_ptr(), packed.data_ptr(), in_features, out_features)
