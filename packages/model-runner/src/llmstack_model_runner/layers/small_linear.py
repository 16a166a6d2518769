"""A linear layer of a head that sees one row per prompt."""

from __future__ import annotations

import torch

from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot


class SmallLinear:
    """x Wᵀ + b in float32, whatever the model computes in; never quantized, since there is nothing to gain."""

    def __init__(
        self, name: str, in_features: int, out_features: int, *, device: torch.device, has_bias: bool = True
    ) -> None:
        self._name = name
        self._weight = torch.empty((out_features, in_features), dtype=torch.float32, device=device)
        self._bias = torch.empty(out_features, dtype=torch.float32, device=device) if has_bias else None

    def slots(self) -> dict[str, WeightSlot]:
        """The weight, and the bias if there is one."""
        slots = {f"{self._name}.weight": WeightSlot(tuple(self._weight.shape), self._load_weight)}
        if self._bias is not None:
            slots[f"{self._name}.bias"] = WeightSlot(tuple(self._bias.shape), self._load_bias, WeightKind.BIAS)
        return slots

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in_features] of any floating type to float32 [n, out_features]."""
        return torch.nn.functional.linear(x.float(), self._weight, self._bias)

    def _load_weight(self, tensor: torch.Tensor) -> None:
        self._weight.copy_(tensor)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        if self._bias is not None:
            self._bias.copy_(tensor)
