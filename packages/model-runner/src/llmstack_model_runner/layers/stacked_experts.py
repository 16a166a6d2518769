"""Experts whose weights are one tensor per projection, with biases: gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.activation import clamped_swiglu
from llmstack_kernels.grouped_linear import PackedExperts, group_rows, grouped_linear, pack_experts
from llmstack_kernels.linear import AnyStoredWeight, pack_linear
from llmstack_model_runner.layers.adapted_experts import ExpertMatrix
from llmstack_model_runner.layers.experts import Experts, ExpertSettings
from llmstack_model_runner.layers.packing import (
    are_packed,
    experts_packed_before,
    keep_experts,
    pack_stored,
    packing,
)
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot


@dataclass(frozen=True, slots=True)
class StackedExpertSettings(ExpertSettings):
    """Experts with a clamped gate.

    Attributes:
        alpha: Factor within the gate's sigmoid.
        limit: Bound of gates and ups.
    """

    alpha: float = 1.702
    limit: float = 7.0


class StackedExperts(Experts):
    """down(clamped_swiglu(gate_up(x) + b)) + c of each chosen expert, summed with the router's weights in float32.

    Outputs of `gate_up` are gates and ups in turns, in the checkpoint and here.
    """

    def __init__(
        self,
        prefix: str,
        size: int,
        activation: str,
        settings: StackedExpertSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(prefix, size, activation, settings, dtype, device)
        self._limits = settings.alpha, settings.limit
        self._router_parts: dict[str, torch.Tensor] = {}

    def _make_stacks(
        self, num_experts: int, inner_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        own, inner = self._experts, self._inner
        pairs = range(2 * inner.start, 2 * inner.stop)
        shapes = ((2 * self._settings.inner_size, size), (size, self._settings.inner_size))
        num_all = self._settings.num_experts
        names = [f"{self._name}.experts.{part}" for part in ("gate_up_proj", "down_proj")]
        outputs, inputs = (pairs, inner) if self._is_cut else (None, None)
        self._whole_gate_up = _Projection(names[0], num_all, shapes[0], own, outputs, None, dtype, device)
        self._whole_down = _Projection(names[1], num_all, shapes[1], own, None, inputs, dtype, device)

    def _matrices(self, size: int) -> Sequence[Sequence[ExpertMatrix]]:
        inner, num_inner = self._inner, self._settings.inner_size
        pairs = slice(2 * inner.start, 2 * inner.stop)
        inputs = inner if self._is_cut else None
        gate_up = ExpertMatrix("gate_up_proj", (size, 2 * num_inner), is_stacked=True, outputs=lambda rows: rows[pairs])
        return [[gate_up], [ExpertMatrix("down_proj", (num_inner, size), is_stacked=True, inputs=inputs)]]

    def slots(self) -> dict[str, WeightSlot]:
        """The router with its bias, and weights and biases of two projections."""
        settings = self._settings
        router = (settings.num_experts, self._whole_down.shape[0])
        return {
            f"{self._name}.router.weight": WeightSlot(router, partial(self._load_router_part, "weight")),
            f"{self._name}.router.bias": WeightSlot(
                router[:1], partial(self._load_router_part, "bias"), WeightKind.BIAS
            ),
            **self._whole_gate_up.slots(),
            **self._whole_down.slots(),
        }

    def _compute(self, x: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Biases are added by themselves, to the product in the model's type."""
        groups = group_rows(places, len(self._experts))
        rows = places.reshape(-1).clamp(max=len(self._experts) - 1)  # those without an expert of this rank, any bias
        gate_up, down = self._whole_gate_up, self._whole_down
        updates = self._adapted.updates(places, tokens)
        pairs = grouped_linear(x, gate_up.packed, groups) + gate_up.bias.index_select(0, rows)
        inner = clamped_swiglu(pairs if updates is None else updates.add(pairs, x, 0), *self._limits)
        out = grouped_linear(inner, down.packed, groups)
        if updates is not None:
            updates.add(out, inner, 1)
        # Ranks with a part of every expert add up their outputs, of which one has the bias.
        is_first = self._sharding.is_expert_parallel or self._sharding.rank == 0
        return out + down.bias.index_select(0, rows) if is_first else out

    def _load_router_part(self, part: str, tensor: torch.Tensor) -> None:
        parts = self._router_parts
        parts[part] = tensor.to(self._device, self._dtype, copy=True)
        if len(parts) == 2:
            self._router = pack_linear(parts["weight"], parts["bias"], None, packing().is_batch_invariant)
            parts.clear()


class _Projection:
    """One projection of the experts of this rank, and its bias."""

    def __init__(
        self,
        name: str,
        num_experts: int,
        shape: tuple[int, int],
        experts: range,
        outputs: range | None,
        inputs: range | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """This rank's part of experts [out_features, in_features]: some experts, outputs or inputs; None for all."""
        self._name = name
        self.shape = shape
        self._num_experts = num_experts
        self._experts = experts
        self._outputs, self._inputs = outputs, inputs
        self._dtype, self._device = dtype, device
        num_outputs = shape[0] if outputs is None else len(outputs)
        self._own_shape = (len(experts), num_outputs, shape[1] if inputs is None else len(inputs))
        self.bias = torch.zeros((len(experts), num_outputs), dtype=dtype, device=device)
        self._packed: PackedExperts | None = None

    @property
    def packed(self) -> PackedExperts:
        """The packed weights; RuntimeError before they are loaded."""
        if self._packed is None:
            raise RuntimeError("the experts have no weights yet")
        return self._packed

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the weight, whose matrices are transposed in full precision, and of the bias."""
        name, count, (num_outputs, num_inputs) = self._name, self._num_experts, self.shape
        weight, bias = self._part(2, 1), self._part(1, None)
        return {
            name: WeightSlot(
                (count, num_inputs, num_outputs),
                self._load,
                load_stored=self._load_stored,
                stored_shape=(count * num_outputs, num_inputs),
                part=weight,
                skip=self._skip if are_packed(name, self._own_shape) else None,
            ),
            f"{name}_bias": WeightSlot((count, num_outputs), self._load_bias, WeightKind.BIAS, part=bias),
        }

    def _part(self, output_dim: int, input_dim: int | None) -> WeightPart | None:
        """This rank's part of a tensor whose first dimension is the expert."""
        if self._outputs is not None:
            return WeightPart(output_dim, (self._outputs,))
        if self._inputs is not None and input_dim is not None:
            return WeightPart(input_dim, (self._inputs,))
        return None if len(self._experts) == self._num_experts else WeightPart(0, (self._experts,))

    def _load(self, tensor: torch.Tensor) -> None:
        chosen = packing()
        weights = tensor.to(self._device, self._dtype).transpose(1, 2).contiguous()
        packed = pack_experts(weights, chosen.quantization, chosen.is_batch_invariant)
        self._packed = keep_experts(self._name, packed)

    def _skip(self) -> None:
        self._packed = experts_packed_before(self._name, len(self._experts))

    def _load_bias(self, tensor: torch.Tensor) -> None:
        self.bias.copy_(tensor)

    def _load_stored(self, weight: AnyStoredWeight) -> None:
        """Experts are packed as they are stored; widened where inputs cannot be cut, or no kernel reads the format."""
        num_outputs = self.shape[0]
        parts = [weight.rows(slice(num * num_outputs, (num + 1) * num_outputs)) for num in self._experts]
        if self._outputs is not None:
            parts = [part.rows(slice(self._outputs.start, self._outputs.stop)) for part in parts]
        cut = parts if self._inputs is None else [part.columns(self._inputs) for part in parts]
        stored = [part for part in cut if part is not None]
        packed = pack_stored(stored, self._dtype, self._device) if len(stored) == len(parts) else None
        if packed is None:
            inputs = slice(None) if self._inputs is None else slice(self._inputs.start, self._inputs.stop)
            widened = [part.to(self._device).dequantize(self._dtype)[:, inputs] for part in parts]
            packed = pack_experts(torch.stack(widened), None, packing().is_batch_invariant)
        self._packed = keep_experts(self._name, packed)
