"""Scales of 8-bit keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from llmstack_kernels.float8_cache import STORED_TYPE
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot


class KVScales:
    """Factors that stored numbers of each KV head are multiplied by: 1, unless the checkpoint has others."""

    def __init__(self, num_kv_heads: int, device: torch.device) -> None:
        self._key = torch.ones(num_kv_heads, device=device)
        self._value = torch.ones(num_kv_heads, device=device)

    def of(self, key_cache: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of keys and of values, float32 [num_kv_heads]; None if the storage is not in 8 bits."""
        return (self._key, self._value) if key_cache.dtype == STORED_TYPE else (None, None)

    def slots(self, key_names: Sequence[str], value_names: Sequence[str]) -> dict[str, WeightSlot]:
        """Weight slots under all given names; each tensor is one number for all heads."""
        named = ((key_names, self._key), (value_names, self._value))
        return {
            name: WeightSlot((), partial(_fill, name, scale), WeightKind.SCALE)
            for names, scale in named
            for name in names
        }


def _fill(name: str, scale: torch.Tensor, number: torch.Tensor) -> None:
    value = float(number)
    if not 0 < value < float("inf"):
        raise ValueError(f"the checkpoint's {name} must be a positive number, but is {value}.")
    scale.fill_(value)
