"""Linear layers through oneDNN, with weights reordered once at packing.

Measured (2 cores, AVX-512): 4 times `F.linear` at 2 rows in float32, 2 times in bfloat16; and from 2 rows up an output
row is bit-equal whatever the number of rows and its place among them. One row alone may take another kernel, so it is
computed as two. (Not so in bfloat16 where the processor has AMX: three to five rows have other bits than ten there.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.quantization import QuantizedWeight, quantize
from llmstack_kernels.linear.reference import PlainLinear, finish
from llmstack_kernels.linear.stored_weight import StoredWeight

__all__ = [
    "QUANTIZED_DTYPES",
    "STORED_DTYPES",
    "OneDnnLinear",
    "describe",
    "is_available",
    "pack_linear",
    "pack_quantized_linear",
    "pack_stored_linear",
    "quantize",
]

QUANTIZED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {}  # none is computed without widening
STORED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {}
_CANDIDATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneDnnLinear(SizedLinear):
    """A weight in oneDNN's blocked layout."""

    __slots__ = ("_bias", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if num_rows == 0:
            return x.new_empty((*x.shape[:-1], self.out_features), dtype=out_dtype)
        rows = rows.repeat(2, 1) if num_rows == 1 else rows.contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return finish(out[:num_rows].view(*x.shape[:-1], self.out_features), activation, residual, out_dtype)


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> OneDnnLinear | PlainLinear:
    """Packs for oneDNN, always batch-invariant; types without a matrix kernel stay unpacked."""
    if weight.dtype in _packable_dtypes():
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_quantized_linear(
    quantized: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> OneDnnLinear | PlainLinear:
    """Widens the weight: values are the quantized ones, size and speed are not."""
    return pack_linear(quantized.dequantize(dtype), bias)


def pack_stored_linear(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> OneDnnLinear | PlainLinear:
    """Widens the weight of a quantized checkpoint, too."""
    return pack_linear(weight.dequantize(dtype), bias)


def is_available() -> bool:
    """True when this build of PyTorch can pack weights of any type."""
    return bool(_packable_dtypes())


def describe() -> str:
    """Which types are packed."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _packable_dtypes())
    return f"oneDNN packed weights for {names}; other types unpacked"


@cache
def _packable_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return ()
    return tuple(dtype for dtype in _CANDIDATE_DTYPES if _can_pack(dtype))


def _can_pack(dtype: torch.dtype) -> bool:
    try:
        OneDnnLinear(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(2, 16, dtype=dtype))
    except (RuntimeError, NotImplementedError):  # oneDNN's errors if the processor lacks the instructions
        return False
    return True
