"""Native linear layers whose inputs are rounded a segment at a time."""

from __future__ import annotations

import torch

from llmstack_kernels.linear.block_weight import BLOCK_TYPES, BlockWeight
from llmstack_kernels.linear.native_layer import PANEL, NativeLinear, num_columns
from llmstack_kernels.linear.native_stored import SCALE_TYPES, NativeOrderedLinear, in_order
from llmstack_kernels.linear.packed_weight import PackedWeight
from llmstack_kernels.linear.stored_weight import StoredWeight
from llmstack_kernels.native import Int, NativeLibrary, Pointer
from llmstack_kernels.native.huge_pages import empty_in_huge_pages

SEGMENTS = "segments"
"""How the names of these schemes begin."""

_FUNCTION = (SEGMENTS, (Pointer, Int, Int, Int))  # packed, format, type of scales, segments of a block
_FORMATS = ("4", "4_points", "4_smallest", "5", "5_smallest", "6", "8", "8_points")
"""In the order of `AllSegmentFormats`: bits, and what a group has beside its scale."""

_TWO_LEVELS = 3
_SEGMENT = 32
_TYPE_TO_FORMAT = {
    "Q4_0": "4", "Q4_1": "4_smallest", "Q5_0": "5", "Q5_1": "5_smallest", "Q8_0": "8",
    "Q4_K": "4_smallest", "Q5_K": "5_smallest", "Q6_K": "6",
}  # fmt: skip


class NativeSegmentLinear(NativeLinear):
    """A weight in panels of segments."""

    __slots__ = ()

    def packed_weight(self) -> PackedWeight:
        """The weight without its bias; the scheme has what its panels do not say."""
        _, layout, scales, segments_per_block = self._weight
        scheme = f"{SEGMENTS}_{layout}_{scales}"
        shape = (self.out_features, self.in_features)
        return PackedWeight(shape, self._dtype, scheme, segments_per_block, self._kept)


def pack_segments(
    weight: StoredWeight, dtype: torch.dtype, bias: torch.Tensor | None, native: NativeLibrary
) -> NativeLinear | NativeOrderedLinear:
    """Packs a weight of `fits_segments`; `dtype` is that of the inputs."""
    out_features, in_features = weight.shape
    name = f"{weight.num_bits}{'' if weight.zeros is None else '_points'}"
    is_one = weight.scales.shape[1] == 1
    kind = (
        _FORMATS.index(name),
        SCALE_TYPES[weight.scales.dtype],
        -(-in_features // _SEGMENT) if is_one else weight.group_size // _SEGMENT,
    )
    packed = _empty(native, kind, (out_features, in_features))
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    zeros = None if weight.zeros is None else weight.zeros.contiguous()
    native.function("linear_pack_segments", Pointer, Pointer, Pointer, Int, Int, Int, Int, Int, Int, Pointer)(
        numbers.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), *kind,
        in_features, out_features, scales.shape[1], packed.data_ptr(),
    )  # fmt: skip
    return in_order(_layer((out_features, in_features), dtype, bias, packed, kind, native), weight.order, native)


def pack_blocks(
    weight: BlockWeight, dtype: torch.dtype, bias: torch.Tensor | None, native: NativeLibrary
) -> NativeLinear:
    """Packs blocks of a file in one pass over them."""
    block, name = BLOCK_TYPES[weight.block_type], _TYPE_TO_FORMAT[weight.block_type]
    has_levels = block.num_inputs > block.segment
    scales = _TWO_LEVELS if has_levels else SCALE_TYPES[torch.float16]
    kind = (_FORMATS.index(name), scales, block.num_inputs // block.segment)
    out_features, in_features = weight.shape
    packed = _empty(native, kind, (out_features, in_features))
    _call_with_blocks(native, "pack", weight, packed)
    return _layer((out_features, in_features), dtype, bias, packed, kind, native)


def widen(weight: BlockWeight, native: NativeLibrary) -> torch.Tensor:
    """The weights that the blocks stand for: float32 [out_features, in_features]."""
    widened = torch.empty(weight.shape)
    _call_with_blocks(native, "widen", weight, widened)
    return widened


def are_finite(weight: BlockWeight, native: NativeLibrary) -> bool:
    """Whether all scales are finite numbers."""
    is_damaged = torch.zeros(1, dtype=torch.int64)
    _call_with_blocks(native, "check", weight, is_damaged)
    return not is_damaged


def _call_with_blocks(native: NativeLibrary, what: str, weight: BlockWeight, out: torch.Tensor) -> None:
    addresses, block_type = weight.addresses(), [*BLOCK_TYPES].index(weight.block_type)
    out_features, in_features = weight.shape
    native.function(f"linear_{what}_blocks", Pointer, Int, Int, Int, Pointer)(
        addresses.data_ptr(), block_type, in_features, out_features, out.data_ptr()
    )


def segments_of_packed(packed: PackedWeight, bias: torch.Tensor | None, native: NativeLibrary) -> NativeLinear:
    """The layer over a weight that was packed in the same variant, without its order."""
    _, layout, scales = packed.scheme.split("_")
    (tensor,) = packed.tensors
    return _layer(packed.shape, packed.dtype, bias, tensor, (int(layout), int(scales), packed.group_size), native)


def _layer(
    shape: tuple[int, int], dtype: torch.dtype, bias: torch.Tensor | None, packed: torch.Tensor,
    kind: tuple[int, int, int], native: NativeLibrary,
) -> NativeLinear:  # fmt: skip
    return NativeSegmentLinear(shape, dtype, bias, (packed,), (packed.data_ptr(), *kind), _FUNCTION, native)


def _empty(native: NativeLibrary, kind: tuple[int, int, int], shape: tuple[int, int]) -> torch.Tensor:
    num_bytes = torch.zeros(1, dtype=torch.int64)
    native.function("segments_panel_bytes", Int, Int, Int, Int, Pointer)(*kind, shape[1], num_bytes.data_ptr())
    return empty_in_huge_pages(num_columns(shape[0]) // PANEL * int(num_bytes), torch.uint8)
