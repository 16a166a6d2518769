"""compressed-tensors: integers, packed or not, FP8 and MXFP4."""

from __future__ import annotations

from typing import ClassVar

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat, read_block
from llmstack_model_runner.checkpoint_formats.floats import mxfp4_weight, read_fp8, spread_scales
from llmstack_model_runner.checkpoint_formats.layer_tensors import (
    LayerTensors,
    group_size_of,
    require_matrix,
    require_shape,
    runs_of_groups,
    unpack_last,
)

_IGNORED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")


class CompressedTensorsReader:
    """Tells the kind of a layer by its tensors, since groups of layers may differ and some are left out.

    `weight_packed` has integers plus half of their range; `weight_zero_point` is packed along the outputs.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"weight_scale"})
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", *_IGNORED}
    )

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        groups = checkpoint.config["config_groups"].values()
        self._blocks = {read_block(group["weights"], "block_structure") for group in groups} - {None}
        self._has_only_blocks = all(group["weights"].get("strategy") == "block" for group in groups)
        self._bits = {int(group["weights"]["num_bits"]) for group in groups}
        self._group_sizes = {group["weights"].get("group_size") for group in groups} - {None, -1}

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        layer.check_finite("input_scale", "output_scale")
        if "weight_packed" in layer:
            packed = layer.get("weight_packed", torch.int32, torch.uint8)
            if packed.dtype == torch.uint8:
                return mxfp4_weight(packed, layer.get("weight_scale", torch.uint8))
            return self._read_packed(layer, packed)
        weight = layer.get("weight", torch.int8, torch.float8_e4m3fn)
        if weight.dtype == torch.float8_e4m3fn:
            return read_fp8(layer, self._find_block(layer, weight))
        return self._read_int8(layer, weight)

    def _find_block(self, layer: LayerTensors, weight: torch.Tensor) -> tuple[int, int] | None:
        """The block of a layer with a matrix of scales, of those that the configuration names."""
        scales = layer.get_scales("weight_scale")
        if weight.ndim != 2 or not self._blocks:
            return None
        for block in self._blocks:
            if block and tuple(scales.shape) == (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])):
                return block
        return next(iter(self._blocks)) if self._has_only_blocks else None  # whose error names the shapes

    def _read_packed(self, layer: LayerTensors, packed: torch.Tensor) -> StoredWeight:
        num_outputs, num_words = require_matrix("weight_packed", packed)
        shape = require_shape("weight_shape", layer.get("weight_shape", torch.int64, torch.int32), 2).tolist()
        bits = next((b for b in self._bits if -(-max(shape[1], 1) * b // 32) == num_words), None)
        if bits is None or shape[0] != num_outputs or shape[1] < 1:
            raise ValueError(f"weight_packed of {list(packed.shape)} does not fit weight_shape {shape}.")
        numbers = unpack_last(packed, bits)[:, : shape[1]]
        zeros = None
        if "weight_zero_point" in layer:
            zeros = _read_zeros(layer, num_outputs, bits)
        return self._read_grouped(layer, "int4" if bits == 4 else "int8", numbers, zeros)

    def _read_int8(self, layer: LayerTensors, weight: torch.Tensor) -> StoredWeight:
        require_matrix("weight", weight)
        zeros = None
        if "weight_zero_point" in layer:
            zeros = _unsigned(layer.get("weight_zero_point", torch.int8))
        numbers = _unsigned(weight)
        if self._bits == {4}:  # naive, a byte for each
            numbers, zeros = numbers - 120, None if zeros is None else zeros - 120
        return self._read_grouped(layer, "int4" if self._bits == {4} else "int8", numbers, zeros)

    def _read_grouped(
        self, layer: LayerTensors, layout: str, numbers: torch.Tensor, zeros: torch.Tensor | None
    ) -> StoredWeight:
        """A weight of integers with scales per tensor, output or group."""
        num_outputs, num_inputs = numbers.shape
        scales = layer.get_scales("weight_scale")
        if scales.ndim == 2 and scales.shape[0] == num_outputs:
            size = self._find_group_size(num_inputs, scales.shape[1])
        else:
            scales, size = spread_scales("weight_scale", scales, (num_outputs, num_inputs), None)
        if zeros is not None:
            if not zeros.numel():
                raise ValueError("weight_zero_point is empty.")
            zeros = zeros.reshape(-1, 1).expand(num_outputs, 1) if zeros.numel() == 1 else zeros
            zeros = require_shape("weight_zero_point", zeros.reshape(zeros.shape[0], -1), *scales.shape).contiguous()
        order = None
        if "weight_g_idx" in layer:
            group_ids = require_shape("weight_g_idx", layer.get("weight_g_idx", torch.int32, torch.int64), num_inputs)
            if not (group_ids == -1).all():  # the library's value for "no order"
                order = runs_of_groups(group_ids, num_inputs, size)
        ordered = numbers if order is None else numbers[:, order]
        return StoredWeight(layout, ordered.contiguous(), scales.contiguous(), size, zeros, order=order)

    def _find_group_size(self, num_inputs: int, num_groups: int) -> int:
        """The group size that the configuration names for so many groups."""
        fitting = (size for size in self._group_sizes if -(-num_inputs // size) == num_groups)
        return group_size_of(num_inputs, num_groups, next(fitting, None))


def _read_zeros(layer: LayerTensors, num_outputs: int, bits: int) -> torch.Tensor:
    """Zero points of packed weights: packed too, or a byte for each, as those of whole tensors are."""
    found = layer.get("weight_zero_point", torch.int32, torch.int8)
    if found.dtype == torch.int8:
        return _unsigned(found) - (128 - (1 << bits - 1))
    _, num_groups = require_matrix("weight_zero_point", found)
    require_shape("weight_zero_point", found, -(-num_outputs // (32 // bits)), num_groups)
    return unpack_last(found.t().contiguous(), bits)[:, :num_outputs].t()


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Integers of 8 bits plus 128."""
    return numbers.view(torch.uint8) ^ 128
