"""Linear layers by PyTorch's matrix product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from llmstack_kernels.activation import gelu_tanh_and_mul, silu_and_mul
from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.quantization import QuantizedWeight, quantize
from llmstack_kernels.linear.stored_weight import StoredWeight

__all__ = [
    "GATES",
    "QUANTIZED_DTYPES",
    "STORED_DTYPES",
    "PlainLinear",
    "finish",
    "pack_linear",
    "pack_quantized_linear",
    "pack_stored_linear",
    "quantize",
]

QUANTIZED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {}  # none is computed without widening
STORED_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {}  # nor are weights of quantized checkpoints
_ACTIVATION_TO_FUNCTION: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}

GATES: Mapping[str, str] = {"silu_and_mul": "silu", "gelu_tanh_and_mul": "gelu_tanh"}
"""Gated activation to the function of its first half; the second half is multiplied by the result."""

_GATE_TO_FUNCTION: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
}


def finish(
    out: torch.Tensor, activation: str, residual: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """The epilogue of a product: activation, type and residual, one operation after another."""
    if activation in GATES:
        out = _GATE_TO_FUNCTION[activation](out)
    elif activation != "none":
        out = _ACTIVATION_TO_FUNCTION[activation](out)
    if out_dtype is not None:
        out = out.to(out_dtype)
    return out if residual is None else out + residual


class PlainLinear(SizedLinear):
    """A linear layer over an unpacked weight."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.shape)
        self._weight = weight  # [out_features, in_features]
        self._bias = bias

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        return finish(F.linear(x, self._weight, self._bias), activation, residual, out_dtype)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, is_batch_invariant: bool = False) -> PlainLinear:
    """Keep weight and bias as they are; whether rows depend on their number is up to PyTorch, asked or not."""
    return PlainLinear(weight, bias)


def pack_quantized_linear(
    quantized: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> PlainLinear:
    """Widen again: the values are the quantized ones, the size and the speed are not."""
    return PlainLinear(quantized.dequantize(dtype), bias)


def pack_stored_linear(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> PlainLinear:
    """Widen: this defines what the weights of a quantized checkpoint mean."""
    return PlainLinear(weight.dequantize(dtype), bias)
