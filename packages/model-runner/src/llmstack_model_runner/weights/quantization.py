"""Description of quantized weights, for the log, and what models can hold them."""

from __future__ import annotations

import torch

from llmstack_kernels.linear import (
    INT4_DYNAMIC,
    INT8_DYNAMIC,
    STORED_LAYOUTS,
    bits_per_weight,
    computes_quantized,
    computes_stored,
)
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat
from llmstack_model_runner.models.base import Model

_DYNAMIC = (INT8_DYNAMIC, INT4_DYNAMIC)
_LAYOUT_TO_NAME = {"table4": "table4 other than MXFP4"}


def describe_quantization(
    scheme: str | None, dtype: torch.dtype, device: torch.device, checkpoint_format: CheckpointFormat | None = None
) -> str:
    """The scheme or format, with a note if it saves neither memory nor time; empty for weights in full precision."""
    name = str(dtype).removeprefix("torch.")
    if checkpoint_format is not None:
        others = [layout for layout in STORED_LAYOUTS if not computes_stored(dtype, device.type, layout)]
        widened = [_LAYOUT_TO_NAME.get(layout, layout) for layout in others]
        note = f", widened to {name} where stored as {' or '.join(widened)}" if widened else ""
        inputs = f", inputs rounded by {scheme}" if scheme else ""
        return f"{checkpoint_format.method} of the checkpoint{inputs}{note}"
    if scheme in _DYNAMIC and not computes_quantized(dtype, device.type, scheme):
        return f"{scheme}, computed in float64, which saves no time: no kernel here computes {name} from integers"
    if scheme is None or computes_quantized(dtype, device.type, scheme):
        return scheme or ""
    return f"{scheme}, widened again, which saves neither memory nor time: no kernel here computes {name} from {scheme}"


def num_weight_bytes(
    model: Model,
    dtype: torch.dtype,
    quantization: str | None = None,
    checkpoint_format: CheckpointFormat | None = None,
) -> int:
    """Bytes of weights that a step reads, as if all of them were linear layers."""
    num_bits: float = 8 * dtype.itemsize if quantization is None else bits_per_weight(quantization)
    if checkpoint_format is not None:
        num_bits = checkpoint_format.num_bits
    return int(sum(slot.num_elements for slot in model.slots().values()) * num_bits / 8)


def scheme_on(device: torch.device, scheme: str | None, option: str | None) -> str | None:
    """The scheme that the device computes. The scheme of GGUF files, which no `option` names, is for CPUs alone.

    Raises:
        ValueError: The device does not compute the scheme that `option` names.
    """
    if device.type == "cpu" or scheme != INT4_DYNAMIC:
        return scheme
    if option == scheme:
        raise ValueError(
            f"quantization {scheme} is computed on CPUs only; int8_dynamic, int8, int4 and fp8 run on a GPU."
        )
    return None
