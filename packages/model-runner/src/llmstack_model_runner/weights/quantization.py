"""Quantization while loading: from what it starts, and how its layers are then computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_kernels.linear import QUANTIZATIONS, computes_quantized

_FIELDS = ("quantization_config", "compression_config")


def refuse_quantized_checkpoint(config: Mapping[str, Any]) -> None:
    """ValueError if a config.json says that the checkpoint's own weights are quantized, by whatever method."""
    for name in _FIELDS:
        found = config.get(name)
        if found:
            method = found.get("quant_method") if isinstance(found, Mapping) else None
            known = f"{', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}"
            raise ValueError(
                f"config.json: {name}: the weights are quantized already (by {str(method)[:64]}); only those in full "
                f"precision are loaded, which the option `quantization` then makes {known} of."
            )


def describe_quantization(scheme: str, dtype: torch.dtype, device: torch.device) -> str:
    """The scheme, and whether it saves anything."""
    if computes_quantized(dtype, device.type, scheme):
        return scheme
    name = str(dtype).removeprefix("torch.")
    return f"{scheme}, widened again, which saves neither memory nor time: no kernel here computes {name} from {scheme}"
