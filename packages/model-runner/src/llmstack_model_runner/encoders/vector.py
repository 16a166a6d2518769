"""Learned vectors: additions such as a class token, or factors of a scale."""

from __future__ import annotations

import torch

from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot


class Vector:
    """One or several vectors of the checkpoint.

    Attributes:
        value: The vectors, in the shape of the checkpoint.
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self.value = torch.empty(shape, dtype=dtype, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        return {self._name: WeightSlot(tuple(self.value.shape), self._load, WeightKind.BIAS)}

    def _load(self, tensor: torch.Tensor) -> None:
        self.value.copy_(tensor)
