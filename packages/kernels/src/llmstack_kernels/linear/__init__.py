"""Linear layers with weights packed for the processor, and fused epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol, TypeAlias

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.linear.block_weight import BLOCK_TYPES, BlockWeight, join_blocks
from llmstack_kernels.linear.composed import ConcatenatedLinear, concatenate_linears
from llmstack_kernels.linear.dynamic import INT8_DYNAMIC, DynamicLinear, DynamicWeight, as_dynamic, round_weight
from llmstack_kernels.linear.packed_weight import PackedWeight
from llmstack_kernels.linear.quantization import QUANTIZATIONS, QuantizedWeight, bits_per_weight
from llmstack_kernels.linear.reference import GATES
from llmstack_kernels.linear.segments import INT4_DYNAMIC, SegmentLinear, fits_segments
from llmstack_kernels.linear.stored_weight import STORED_LAYOUTS, StoredWeight
from llmstack_kernels.linear.stored_weight import join_stored as _join_numbers

__all__ = [
    "ACTIVATIONS",
    "BLOCK_TYPES",
    "GATED_ACTIVATIONS",
    "INT4_DYNAMIC",
    "INT8_DYNAMIC",
    "QUANTIZATIONS",
    "STORED_LAYOUTS",
    "AnyStoredWeight",
    "BlockWeight",
    "PackedLinear",
    "PackedWeight",
    "QuantizedWeight",
    "StoredWeight",
    "bits_per_weight",
    "computes_quantized",
    "computes_stored",
    "concatenate_linears",
    "join_stored",
    "linear",
    "linear_of_packed",
    "pack_linear",
    "pack_stored_linear",
    "packed_weights",
    "packing_version",
    "quantize",
]

AnyStoredWeight: TypeAlias = StoredWeight | BlockWeight
"""A weight of a quantized checkpoint: its numbers and scales, or the blocks of a file that have them."""

ACTIVATIONS = ("none", "relu", "relu_squared", "gelu", "gelu_tanh", "silu")
GATED_ACTIVATIONS = tuple(GATES)
"""Applied to the first half of the outputs, times the second half; the output has half as many features."""


class PackedLinear(Protocol):
    """A packed weight and bias. It owns its copy, so the tensors it was packed from may be dropped."""

    @property
    def in_features(self) -> int:
        """Length of an input row."""

    @property
    def out_features(self) -> int:
        """Length of an output row."""

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual: [..., in_features] to [..., out_features].

        Args:
            x: In the weight's type; its rows may lie apart.
            activation: One of `ACTIVATIONS` or `GATED_ACTIVATIONS`; these halve the output.
            residual: Like the output, contiguous.
            out_dtype: float32, or the weight's type by default.
        """


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantization: str | None = None,
    is_batch_invariant: bool = False,
) -> PackedLinear:
    """Pack a weight [out_features, in_features] and an optional bias [out_features].

    Args:
        weight: Is copied or kept, and must not be changed afterwards.
        bias: The same.
        quantization: One of `QUANTIZATIONS`: the weight is rounded; inputs and sums are not. `INT8_DYNAMIC` rounds
            inputs too, a row at a time; `INT4_DYNAMIC` does so by 32 inputs of a row, and the weight as `int4`.
        is_batch_invariant: A row's result is bit-equal however many rows are beside it. On a GPU that costs speed
            where there are many rows; on a CPU it holds anyway. `numeric_contract` says where it cannot be had.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out_features, in_features], got {tuple(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} outputs.")
    module = implementation("linear", weight.device.type)
    packed: PackedLinear
    if quantization is None:
        packed = module.pack_linear(weight, bias, is_batch_invariant)
    elif quantization == INT8_DYNAMIC:
        packed = _pack_dynamic(module, round_weight(weight), weight.dtype, bias)
    elif quantization == INT4_DYNAMIC:
        packed = _pack_segments(module, module.quantize(weight, "int4").stored(), weight.dtype, bias)
    else:
        quantized = module.quantize(weight, quantization)
        packed = module.pack_quantized_linear(quantized, weight.dtype, bias, is_batch_invariant)
    return packed


def _pack_dynamic(
    module: ModuleType, weight: DynamicWeight, dtype: torch.dtype, bias: torch.Tensor | None
) -> PackedLinear:
    if not hasattr(module, "pack_dynamic_linear"):
        return DynamicLinear(weight, bias)
    packed: PackedLinear = module.pack_dynamic_linear(weight, dtype, bias)
    return packed


def _pack_segments(
    module: ModuleType, weight: AnyStoredWeight, dtype: torch.dtype, bias: torch.Tensor | None
) -> PackedLinear:
    if not hasattr(module, "pack_segment_linear"):
        return SegmentLinear(weight, bias)
    packed: PackedLinear = module.pack_segment_linear(weight, dtype, bias)
    return packed


def pack_stored_linear(
    weight: AnyStoredWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    is_batch_invariant: bool = False,
    input_rounding: str | None = None,
) -> PackedLinear:
    """Pack a weight of a quantized checkpoint and an optional bias, for inputs of `dtype`.

    With `input_rounding` inputs are rounded where integers allow: `INT8_DYNAMIC` where those of 8 bits are symmetric
    and have one scale per output, `INT4_DYNAMIC` where groups are multiples of 32 inputs, and for blocks.
    """
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} outputs.")
    if isinstance(weight, BlockWeight):
        if input_rounding == INT4_DYNAMIC:
            return _pack_segments(implementation("linear", "cpu"), weight, dtype, bias)
        weight = weight.stored()
    module = implementation("linear", weight.numbers.device.type)
    if input_rounding == INT4_DYNAMIC and fits_segments(weight):
        return _pack_segments(module, weight, dtype, bias)
    integers = as_dynamic(weight) if input_rounding == INT8_DYNAMIC else None
    if integers is not None:
        return _pack_dynamic(module, integers, dtype, bias)
    packed: PackedLinear = module.pack_stored_linear(weight, dtype, bias, is_batch_invariant)
    return packed


def join_stored(parts: Sequence[AnyStoredWeight]) -> AnyStoredWeight | None:
    """The outputs of all parts, one after another; None where they cannot be one weight."""
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if blocks:
        return join_blocks(blocks) if len(blocks) == len(parts) else None
    return _join_numbers([part for part in parts if isinstance(part, StoredWeight)])


def packing_version(device_type: str) -> str:
    """Changes with the layout of packed weights; empty where they cannot be kept."""
    module = implementation("linear", device_type)
    return str(module.packing_version()) if hasattr(module, "packing_version") else ""


def packed_weights(packed: PackedLinear) -> tuple[PackedWeight, ...] | None:
    """The weights of a packed layer, one per part, to be kept under `packing_version`; None if one cannot be."""
    module = implementation("linear", "cpu")
    if not hasattr(module, "packed_weight"):
        return None
    parts = packed.parts if isinstance(packed, ConcatenatedLinear) else [packed]
    found = [module.packed_weight(part) for part in parts]
    return None if None in found else tuple(found)


def linear_of_packed(weights: Sequence[PackedWeight], bias: torch.Tensor | None) -> PackedLinear:
    """The layer of weights that were kept under the present `packing_version`.

    Raises:
        ValueError: A weight is damaged.
    """
    module = implementation("linear", "cpu")
    biases = [None] * len(weights) if bias is None else bias.split([weight.shape[0] for weight in weights])
    layers = [module.linear_of_packed(weight, own) for weight, own in zip(weights, biases, strict=True)]
    return concatenate_linears(layers)


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round a weight [out_features, in_features]; ValueError unless `scheme` is one of `QUANTIZATIONS`."""
    quantized: QuantizedWeight = implementation("linear", weight.device.type).quantize(weight, scheme)
    return quantized


def computes_quantized(dtype: torch.dtype, device_type: str, scheme: str = "int8") -> bool:
    """Whether layers quantized by `scheme`, with inputs of `dtype`, are computed from their small numbers.

    Where not, packing widens the weights again: the values are the quantized ones, the size and the speed are not.
    """
    return dtype in implementation("linear", device_type).QUANTIZED_DTYPES.get(scheme, ())


def computes_stored(dtype: torch.dtype, device_type: str, layout: str) -> bool:
    """Whether layers of quantized checkpoints in `layout`, with inputs of `dtype`, are computed without widening."""
    return dtype in implementation("linear", device_type).STORED_DTYPES.get(layout, ())


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Apply a packed layer, checking its arguments first."""
    if x.shape[-1] != packed.in_features:
        raise ValueError(f"rows of {x.shape[-1]} do not fit a layer of {packed.in_features} inputs.")
    if activation not in ACTIVATIONS and activation not in GATES:
        known = ", ".join((*ACTIVATIONS, *GATED_ACTIVATIONS))
        raise ValueError(f"activation {activation!r} is unknown; use one of {known}.")
    if activation in GATES and packed.out_features % 2:
        raise ValueError(f"{packed.out_features} outputs have no halves for {activation}.")
    num_outputs = packed.out_features // 2 if activation in GATES else packed.out_features
    if residual is not None and residual.shape != (*x.shape[:-1], num_outputs):
        raise ValueError(f"residual of shape {tuple(residual.shape)} does not fit {num_outputs} outputs.")
    return packed(x, activation, residual, out_dtype)
