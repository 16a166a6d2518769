"""bitsandbytes: numbers of four bits with tables, and integers of 8 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat
from llmstack_model_runner.checkpoint_formats.layer_tensors import (
    LayerTensors,
    require_matrix,
    require_shape,
    split_bytes,
)

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_STATE_BYTES = 4096
_LARGEST_INTEGER = 127
_STORAGE_TYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # of the same bytes


class BitsAndBytesReader:
    """`weight` of four bits, the first number in the high ones, with `weight.absmax`; or of int8 with `SCB`.

    With double quantization `weight.absmax` is itself quantized, and widened here in float32 as the library does.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"weight.absmax", "SCB"})
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {"weight", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight_format", *_STATES}
    ) | markers  # fmt: skip

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        """Each layer describes itself."""

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        return _read_int8(layer) if "SCB" in layer else _read_table(layer)


def _read_int8(layer: LayerTensors) -> StoredWeight:
    weight = layer.get("weight", torch.int8)
    num_outputs, num_inputs = require_matrix("weight", weight)
    largest = require_shape("SCB", layer.get("SCB", torch.float32), num_outputs)
    if "weight_format" in layer and layer.get("weight_format", torch.uint8).sum() != 0:
        raise ValueError("weight_format is not that of rows.")
    scales = (largest / _LARGEST_INTEGER).reshape(num_outputs, 1)
    return StoredWeight("int8", weight.contiguous().view(torch.uint8) ^ 128, scales, num_inputs)


def _read_table(layer: LayerTensors) -> StoredWeight:
    state = _read_state(layer)
    shape, block_size = _shape_of(state), _size_of(state, "blocksize")
    num_outputs, num_inputs = shape
    if num_inputs % block_size:
        raise ValueError(f"blocks of {block_size} inputs do not fit {num_inputs} inputs.")
    packed = layer.get("weight", *_STORAGE_TYPES).contiguous().view(torch.uint8)
    if packed.numel() * 2 != num_outputs * num_inputs:
        raise ValueError(f"weight has {packed.numel()} bytes, which do not fit the shape {list(shape)}.")
    scales = _read_scales(layer, state, num_outputs * num_inputs // block_size).view(num_outputs, -1)
    numbers = split_bytes(packed.reshape(num_outputs, num_inputs // 2), is_low_first=False)
    table = require_shape("weight.quant_map", layer.get("weight.quant_map", torch.float32), 16)
    return StoredWeight("table4", numbers, scales, block_size, table=table.clone())


def _read_scales(layer: LayerTensors, state: Mapping[str, Any], num_blocks: int) -> torch.Tensor:
    scales = layer.get("weight.absmax", torch.float32, torch.uint8)
    require_shape("weight.absmax", scales, num_blocks)
    if scales.dtype == torch.float32:
        return scales.clone()
    offset, size = state.get("nested_offset"), _size_of(state, "nested_blocksize")
    if not isinstance(offset, float | int) or not math.isfinite(offset):
        raise ValueError("nested_offset of the state is no finite number.")
    values = require_shape("weight.nested_quant_map", layer.get("weight.nested_quant_map", torch.float32), 256)
    largest = layer.get("weight.nested_absmax", torch.float32)
    require_shape("weight.nested_absmax", largest, -(-num_blocks // size))
    return values[scales.int()] * largest.repeat_interleave(size)[:num_blocks] + offset


def _read_state(layer: LayerTensors) -> Mapping[str, Any]:
    suffix = next((suffix for suffix in _STATES if suffix in layer), _STATES[0])
    text = layer.get(suffix, torch.uint8)
    if text.numel() > _MAX_STATE_BYTES:
        raise ValueError(f"{suffix} is longer than {_MAX_STATE_BYTES} bytes.")
    try:
        state = json.loads(bytes(text.flatten().tolist()))
    except ValueError:
        raise ValueError(f"{suffix} is no JSON.") from None
    if not isinstance(state, dict):
        raise ValueError(f"{suffix} is no JSON object.")
    return state


def _shape_of(state: Mapping[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError("the shape of the state is no pair of sizes.")
    return shape[0], shape[1]


def _size_of(state: Mapping[str, Any], name: str) -> int:
    size = state.get(name)
    if type(size) is not int or size < 1:
        raise ValueError(f"{name} of the state is no size.")
    return size
