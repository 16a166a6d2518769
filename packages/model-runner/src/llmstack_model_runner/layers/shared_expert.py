"""Shared experts, which compute every token, beside routed experts."""

from __future__ import annotations

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_kernels.linear import PackedLinear, pack_linear
from llmstack_model_runner.layers.experts import Experts
from llmstack_model_runner.layers.feed_forward import GatedFeedForward
from llmstack_model_runner.layers.packing import packing
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots


class SharedExperts:
    """The sum of experts(x) and shared(x)."""

    def __init__(self, experts: Experts, shared: GatedFeedForward) -> None:
        self._experts, self._shared = experts, shared

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of both parts."""
        return collect_slots([self._experts, self._shared])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size]."""
        return self._experts(x) + self._shared(x)


class GatedSharedExpert:
    """experts(x) + sigmoid(gate(x)) * shared(x).

    The gate is not quantized, since it is one row.
    """

    def __init__(
        self, name: str, experts: Experts, shared: GatedFeedForward, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`name` is that of the gate's tensor, without `.weight`."""
        self._name, self._size, self._dtype, self._device = name, size, dtype, device
        self._experts, self._shared = experts, shared
        self._gate: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the experts and of the gate."""
        gate = {f"{self._name}.weight": WeightSlot((1, self._size), self._load_gate)}
        return gate | collect_slots([self._experts, self._shared])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size]."""
        if self._gate is None:
            raise RuntimeError(f"{self._name} has no weights yet")
        return self._experts(x) + sigmoid_gate(self._shared(x), self._gate(x))

    def _load_gate(self, tensor: torch.Tensor) -> None:
        weight = tensor.to(self._device, self._dtype, copy=True)
        self._gate = pack_linear(weight, None, None, packing().is_batch_invariant)
