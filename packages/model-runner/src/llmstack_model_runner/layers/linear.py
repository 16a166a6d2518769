"""Linear layers that read one or several tensors of a checkpoint and are packed as soon as they have them all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from llmstack_kernels.linear import PackedLinear
from llmstack_model_runner.layers.packing import pack
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot


class Linear:
    """x Wᵀ + b, where the rows of W are the parts one after another (such as q, k and v).

    Packing copies, so the checkpoint's tensors are dropped layer by layer: loading never holds the model twice.
    """

    def __init__(
        self,
        in_features: int,
        part_to_out_features: Mapping[str, int],
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        is_transposed: bool = False,
        part_to_row_order: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`is_transposed` says that the checkpoint stores [in_features, out_features], as GPT-2's does.

        `part_to_row_order` names the checkpoint's row for each output of a part, for checkpoints that interleave.
        """
        self.in_features = in_features
        self.out_features = sum(part_to_out_features.values())
        self._parts = dict(part_to_out_features)
        self._has_bias = has_bias
        self._is_transposed = is_transposed
        self._row_orders = part_to_row_order or {}
        self._dtype = dtype
        self._device = device
        self._weight: torch.Tensor | None = None  # [out_features, in_features]
        self._bias: torch.Tensor | None = None  # [out_features]
        self._num_missing = len(self._parts) * (2 if has_bias else 1)
        self._packed: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """Tensor name to slot, for each part's weight and bias."""
        slots: dict[str, WeightSlot] = {}
        offset = 0
        for name, size in self._parts.items():
            shape = (self.in_features, size) if self._is_transposed else (size, self.in_features)
            slots[f"{name}.weight"] = WeightSlot(shape, partial(self._load_weight, name, offset))
            if self._has_bias:
                slots[f"{name}.bias"] = WeightSlot((size,), partial(self._load_bias, name, offset), WeightKind.BIAS)
            offset += size
        return slots

    def __call__(self, x: torch.Tensor, activation: str = "none", residual: torch.Tensor | None = None) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual: [num_tokens, in_features] to [num_tokens, out_features].

        With an activation that gates, one half of the outputs is left.

        Activation and addition cost no pass of their own where the kernel takes them along.
        """
        if self._packed is None:
            raise RuntimeError(f"the layer {', '.join(self._parts)} has no weights yet")
        return self._packed(x, activation, residual)

    def _load_weight(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        rows = self._ordered(name, tensor.t() if self._is_transposed else tensor)
        if len(self._parts) == 1:
            self._weight = rows.to(self._device, self._dtype)
        else:
            if self._weight is None:
                shape = (self.out_features, self.in_features)
                self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._weight[offset : offset + rows.shape[0]].copy_(rows)
        self._count_one()

    def _load_bias(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        if self._bias is None:
            self._bias = torch.empty(self.out_features, dtype=self._dtype, device=self._device)
        self._bias[offset : offset + tensor.shape[0]].copy_(self._ordered(name, tensor))
        self._count_one()

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        order = self._row_orders.get(name)
        return rows if order is None else rows[order]

    def _count_one(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0 and self._weight is not None:
            self._packed = pack(self._weight, self._bias)
            self._weight = self._bias = None
