"""Linear layers in native code, bit-equal for any number of rows.

Measured (one core, AVX-512 with bfloat16): level with oneDNN's packed weights from 32 rows up, 1.3 times as fast at 8
rows and twice at one, where oneDNN computes two; and bias, activation and residual cost no pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.build_native import digest
from llmstack_kernels.linear import quantization
from llmstack_kernels.linear.block_weight import BlockWeight
from llmstack_kernels.linear.dynamic import INT8_DYNAMIC, DynamicLinear, DynamicWeight
from llmstack_kernels.linear.native_layer import NativeLinear
from llmstack_kernels.linear.native_segments import (
    SEGMENTS,
    are_finite,
    pack_blocks,
    pack_segments,
    segments_of_packed,
    widen,
)
from llmstack_kernels.linear.native_stored import (
    STORED,
    NativeOrderedLinear,
    in_order,
    pack_stored,
    stored_of_packed,
)
from llmstack_kernels.linear.packed_weight import PackedWeight
from llmstack_kernels.linear.quantization import QuantizedWeight
from llmstack_kernels.linear.reference import PlainLinear
from llmstack_kernels.linear.segments import INT4_DYNAMIC, SegmentLinear
from llmstack_kernels.linear.stored_weight import STORED_LAYOUTS, StoredWeight
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer, library, require_library

__all__ = [
    "QUANTIZED_DTYPES",
    "STORED_DTYPES",
    "NativeLinear",
    "blocks_are_finite",
    "concatenate",
    "linear_of_packed",
    "pack_dynamic_linear",
    "pack_linear",
    "pack_quantized_linear",
    "pack_segment_linear",
    "pack_stored_linear",
    "packed_weight",
    "packing_version",
    "quantize",
    "quantize_by",
    "stream_weights",
    "widen_blocks",
]

_QUANTIZE_ARGUMENTS = (Pointer, Int, Int, Int, Int, Int, Pointer, Int, Pointer, Pointer)
QUANTIZED_DTYPES = dict.fromkeys((*quantization.QUANTIZATIONS, INT8_DYNAMIC, INT4_DYNAMIC), tuple(DTYPE_TO_SUFFIX))
STORED_DTYPES = dict.fromkeys(STORED_LAYOUTS, tuple(DTYPE_TO_SUFFIX))


def stream_weights(is_on: bool) -> None:
    """Whether a single row's weights bypass the caches on their way, in this process; off at first.

    That pays for models whose weights exceed the last-level cache: what the program needs between steps stays in it.
    Results are the same bits.
    """
    native = library()
    if native is not None:
        native.function("stream_weights", Int)(int(is_on))


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
) -> NativeLinear | NativeOrderedLinear | PlainLinear:
    """Pack; for inputs of other types it is widened again."""
    native = library()
    if native is None or dtype not in DTYPE_TO_SUFFIX:
        return pack_linear(quantized.dequantize(dtype), bias)
    return pack_stored(quantized.stored(), dtype, bias, native)


def pack_dynamic_linear(
    weight: DynamicWeight, dtype: torch.dtype, bias: torch.Tensor | None
) -> NativeLinear | DynamicLinear:
    """Pack integers, for inputs of `dtype` that are rounded too."""
    native = library()
    if native is None or dtype not in DTYPE_TO_SUFFIX:
        return DynamicLinear(weight, bias)
    return NativeLinear.pack_dynamic(weight, dtype, bias, native)


def pack_segment_linear(
    weight: StoredWeight | BlockWeight, dtype: torch.dtype, bias: torch.Tensor | None
) -> NativeLinear | NativeOrderedLinear | SegmentLinear:
    """Pack integers with scales of groups, for inputs of `dtype` that are rounded too."""
    native = library()
    if native is None or dtype not in DTYPE_TO_SUFFIX:
        return SegmentLinear(weight, bias)
    if isinstance(weight, BlockWeight):
        return pack_blocks(weight, dtype, bias, native)
    return pack_segments(weight, dtype, bias, native)


def concatenate(outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous outputs of several layers, one after another in each row; a call that can be captured."""
    native, first = library(), outs[0]
    if native is None:
        return torch.cat([*outs], -1)
    sizes = [one.shape[-1] * one.element_size() for one in outs]
    out = first.new_empty((*first.shape[:-1], sum(one.shape[-1] for one in outs)))
    start = out.data_ptr()
    for one, size in zip(outs, sizes, strict=True):
        native.function("copy_rows", Pointer, Int, Int, Pointer, Int)(
            one.data_ptr(), one.numel() // one.shape[-1], size, start, sum(sizes)
        )
        start += size
    return out


def blocks_are_finite(weight: BlockWeight) -> bool:
    """Whether all scales are finite numbers."""
    return are_finite(weight, require_library())


def widen_blocks(weight: BlockWeight) -> torch.Tensor:
    """The weights that the blocks stand for, in one pass: float32 [out_features, in_features]."""
    return widen(weight, require_library())


def pack_stored_linear(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, is_batch_invariant: bool = False
) -> NativeLinear | NativeOrderedLinear | PlainLinear:
    """Pack what a quantized checkpoint stores; for inputs of other types it is widened."""
    native = library()
    if native is None or dtype not in STORED_DTYPES[weight.layout]:
        return pack_linear(weight.dequantize(dtype), bias)
    return pack_stored(weight, dtype, bias, native)


def linear_of_packed(packed: PackedWeight, bias: torch.Tensor | None) -> NativeLinear | NativeOrderedLinear:
    """A layer over a weight that this variant has packed before; ValueError if its order is no permutation."""
    native = require_library()
    if packed.scheme.startswith(STORED):
        layer = stored_of_packed(packed, bias, native)
    elif packed.scheme.startswith(SEGMENTS):
        layer = segments_of_packed(packed, bias, native)
    else:
        layer = NativeLinear.from_packed(packed, bias, native)
    return in_order(layer, packed.order, native)


def packed_weight(layer: object) -> PackedWeight | None:
    """The weight of a layer that `linear_of_packed` can make again."""
    return layer.packed_weight() if isinstance(layer, NativeLinear | NativeOrderedLinear) else None


def packing_version() -> str:
    """Names the layout of packed weights: the variant, and a digest of the sources."""
    variant = require_library().variant
    return f"{variant} {digest(variant)}"


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round to integers of `scheme`, in one pass."""
    native = library()
    if native is None or weight.dtype not in DTYPE_TO_SUFFIX or scheme not in ("int8", "int4"):
        return quantization.quantize(weight, scheme)
    return quantize_by(native, weight, scheme)


def quantize_by(native: NativeLibrary, weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Quantizes with the given library; for each group a scale that is as good as PyTorch's choice."""
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
