"""Linear layers of one or several tensors of a checkpoint, packed while loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from llmstack_kernels.linear import PackedLinear, StoredWeight
from llmstack_model_runner.layers.packing import pack, pack_parts
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot

_LINEAR_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_GATED_ACTIVATIONS: Mapping[str, str] = {"gelu_pytorch_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"}


class Linear:
    """x Wᵀ + b, where W is the concatenation of its parts, such as q, k and v.

    The layer is packed as soon as its last tensor is loaded. Packing copies, and the checkpoint's tensors are dropped
    layer by layer, so loading never holds the model twice.
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
        """`is_transposed`: the checkpoint stores [in_features, out_features], as GPT-2's does.

        `part_to_row_order`: the checkpoint's row for each output of a part, for checkpoints that interleave rows.
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
        self._stored: dict[str, StoredWeight] = {}  # parts of a quantized checkpoint
        self._num_missing = len(self._parts) * (2 if has_bias else 1)
        self._packed: PackedLinear | None = None

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of each part's weight and bias."""
        slots: dict[str, WeightSlot] = {}
        offset = 0
        for name, size in self._parts.items():
            shape = (self.in_features, size) if self._is_transposed else (size, self.in_features)
            slots[f"{name}.weight"] = WeightSlot(
                shape,
                partial(self._load_weight, name, offset),
                load_stored=partial(self._load_stored, name),
                stored_shape=(size, self.in_features),
            )
            if self._has_bias:
                slots[f"{name}.bias"] = WeightSlot((size,), partial(self._load_bias, name, offset), WeightKind.BIAS)
            offset += size
        return slots

    def __call__(self, x: torch.Tensor, activation: str = "none", residual: torch.Tensor | None = None) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual: [num_tokens, in_features] to [num_tokens, out_features].

        A gated activation halves the outputs. Kernels fuse activation and addition where they can.
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

    def _load_stored(self, name: str, weight: StoredWeight) -> None:
        order = self._row_orders.get(name)
        self._stored[name] = (weight if order is None else weight.rows(order)).to(self._device)
        self._count_one()

    def _load_bias(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        if self._bias is None:
            self._bias = torch.empty(self.out_features, dtype=self._dtype, device=self._device)
        self._bias[offset : offset + tensor.shape[0]].copy_(self._ordered(name, tensor))
        self._count_one()

    def _all_parts(self) -> Iterator[torch.Tensor | StoredWeight]:
        offset = 0
        for name, size in self._parts.items():
            if name in self._stored:
                yield self._stored[name]
            elif self._weight is not None:
                yield self._weight[offset : offset + size]
            offset += size

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        order = self._row_orders.get(name)
        return rows if order is None else rows[order]

    def _count_one(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._pack()

    def _pack(self) -> None:
        if self._stored:
            self._packed = pack_parts([*self._all_parts()], self._bias, self._dtype)
        elif self._weight is not None:
            self._packed = pack(self._weight, self._bias)
        self._weight = self._bias = None
        self._stored = {}


class SmallLinear:
    """x Wᵀ + b in float32, whatever the model computes in, for heads that see one row per prompt.

    It is never quantized, since a head is too small to gain from it.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, *, device: torch.device, has_bias: bool = True
    ) -> None:
        self._name = name
        self._weight = torch.empty((out_features, in_features), dtype=torch.float32, device=device)
        self._bias = torch.empty(out_features, dtype=torch.float32, device=device) if has_bias else None

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of the weight and of the bias, if there is one."""
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


def linear_activation(name: str) -> str:
    """The kernels' name of a configuration's activation; ValueError if it is not supported."""
    return _find(name, _LINEAR_ACTIVATIONS)


def gated_activation(name: str) -> str:
    """The kernels' name of a gated activation, whose first half of outputs gates the second; else ValueError."""
    return _find(name, _GATED_ACTIVATIONS)


def _find(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise ValueError(f"config.json: activation {name[:64]!r} is not supported; {', '.join(known)} are.")
    return known[name]
