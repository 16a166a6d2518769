"""FP8 and MXFP4: small floating-point numbers with scales."""

from __future__ import annotations

from typing import ClassVar

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat, read_block
from llmstack_model_runner.checkpoint_formats.layer_tensors import LayerTensors, require_matrix, split_bytes

MXFP4_GROUP_SIZE = 32
MXFP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
"""The values of the 16 numbers of e2m1; the ninth is minus zero."""

_ACTIVATION_SCALES = ("input_scale", "input_scale_ub", "output_scale")
_E8M0_BIAS, _E8M0_NAN = 127, 255


class FP8Reader:
    """`weight` in e4m3, and `weight_scale` or `weight_scale_inv`, which it is multiplied by in either case.

    A scale of one number is for the tensor, one per row for each output, a matrix for blocks.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"weight_scale", "weight_scale_inv"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"weight", *_ACTIVATION_SCALES}) | markers

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        self._block = read_block(checkpoint.config, "weight_block_size")

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        return read_fp8(layer, self._block)


def read_fp8(layer: LayerTensors, block: tuple[int, int] | None) -> StoredWeight:
    """A weight in e4m3 with its scales."""
    layer.check_finite(*_ACTIVATION_SCALES)
    weight = layer.get("weight", torch.float8_e4m3fn)
    require_matrix("weight", weight)
    suffix = "weight_scale_inv" if "weight_scale_inv" in layer else "weight_scale"
    scales, group_size = spread_scales(suffix, layer.get_scales(suffix), tuple(weight.shape), block)
    return StoredWeight("fp8", weight.contiguous().view(torch.uint8), scales, group_size)


def spread_scales(
    suffix: str, scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[torch.Tensor, int]:
    """Scales of each output and group [outputs, groups], and the group's size, from scales of any coarser kind."""
    num_outputs, num_inputs = shape
    if block is not None:
        wanted = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
        if scales.ndim == 4 and scales.shape[1] == scales.shape[3] == 1:  # as ModelOpt writes them
            scales = scales[:, 0, :, 0]
        if tuple(scales.shape) == wanted:
            return scales.repeat_interleave(block[0], 0)[:num_outputs], block[1]
        raise ValueError(f"{suffix} has the shape {list(scales.shape)} instead of {list(wanted)}.")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(num_outputs, 1), num_inputs
    if tuple(scales.shape) in ((num_outputs,), (num_outputs, 1)):
        return scales.reshape(num_outputs, 1), num_inputs
    raise ValueError(f"{suffix} has the shape {list(scales.shape)}, which fits neither {num_outputs} outputs nor one.")


class MXFP4Reader:
    """`weight_blocks` [outputs, groups, 16] of two numbers of e2m1 per byte, and `weight_scales` in e8m0.

    Those of experts have a dimension more; their outputs follow each other in the weight.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"weight_blocks"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"weight_blocks", "weight_scales"})

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        """The configuration has nothing to choose."""

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        blocks = layer.get("weight_blocks", torch.uint8)
        scales = layer.get("weight_scales", torch.uint8)
        if blocks.ndim not in (3, 4) or not blocks.numel():
            raise ValueError(f"weight_blocks has the shape {list(blocks.shape)}: a matrix or one per expert is needed.")
        if scales.shape != blocks.shape[:-1]:
            raise ValueError(f"the scales have the shape {list(scales.shape)} instead of {list(blocks.shape[:-1])}.")
        return mxfp4_weight(blocks.flatten(-2).flatten(0, -2), scales.flatten(0, -2))


def mxfp4_weight(packed: torch.Tensor, exponents: torch.Tensor) -> StoredWeight:
    """A weight from bytes [outputs, inputs / 2], the first number in the low bits, and exponents of e8m0."""
    num_outputs, num_bytes = require_matrix("the numbers", packed)
    wanted = (num_outputs, -(-2 * num_bytes // MXFP4_GROUP_SIZE))
    if tuple(exponents.shape) != wanted:
        raise ValueError(f"the scales have the shape {list(exponents.shape)} instead of {list(wanted)}.")
    return mxfp4_of_numbers(split_bytes(packed, is_low_first=True), exponents)


def mxfp4_of_numbers(numbers: torch.Tensor, exponents: torch.Tensor) -> StoredWeight:
    """A weight from numbers of four bits [outputs, inputs] and exponents of e8m0 [outputs, groups]."""
    if (exponents == _E8M0_NAN).any():
        raise ValueError("a scale is NaN or infinite.")
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _E8M0_BIAS)
    return StoredWeight("table4", numbers, scales, MXFP4_GROUP_SIZE, table=MXFP4_VALUES.clone())
