"""Description of quantization at load, for the log."""

from __future__ import annotations

import math

import torch

from llmstack_kernels.linear import bits_per_weight, computes_quantized
from llmstack_model_runner.models.base import Model


def describe_quantization(scheme: str, dtype: torch.dtype, device: torch.device) -> str:
    """The scheme, with a note if it saves neither memory nor time."""
    if computes_quantized(dtype, device.type, scheme):
        return scheme
    name = str(dtype).removeprefix("torch.")
    return f"{scheme}, widened again, which saves neither memory nor time: no kernel here computes {name} from {scheme}"


def num_weight_bytes(model: Model, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Bytes of weights that a step reads, as if all of them were linear layers."""
    num_bits = 8 * dtype.itemsize if quantization is None else bits_per_weight(quantization)
    return int(sum(math.prod(slot.shape) for slot in model.slots().values()) * num_bits / 8)
