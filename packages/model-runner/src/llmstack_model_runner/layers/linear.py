"""Linear layers of one or several tensors of a checkpoint, packed while loading."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.linear import AnyStoredWeight, PackedLinear
from llmstack_kernels.native.huge_pages import advise_huge_pages
from llmstack_model_runner.layers.adaptation import AdaptedPart, adapted_layers
from llmstack_model_runner.layers.packing import is_packed, pack, pack_parts, packed_before
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, unread

_LINEAR_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
}
_GATED_ACTIVATIONS: Mapping[str, str] = {"gelu_pytorch_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a checkpoint's tensor that a layer has.

    Attributes:
        part: The rows that are read; None for all rows.
        order: Place of each of the layer's rows among those that are read; None if they are in order.
    """

    num_rows: int
    part: WeightPart | None = None
    order: torch.Tensor | None = None

    def of(self, weight: AnyStoredWeight) -> AnyStoredWeight:
        """These rows of a whole quantized weight."""
        if self.part is not None:
            index = torch.cat([torch.arange(run.start, run.stop) for run in self.part.runs])
            weight = weight.rows(index if self.order is None else index[self.order])
        elif self.order is not None:
            weight = weight.rows(self.order)
        return weight

    def of_plain(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows of a whole matrix."""
        own = rows if self.part is None else self.part.read(rows)
        return own if self.order is None else own[self.order]


class Linear:
    """x Wᵀ + b, where W is the concatenation of its parts, such as q, k and v.

    The layer is packed as soon as its last tensor is loaded. Packing copies, and the checkpoint's tensors are dropped
    layer by layer, so loading never holds the model twice.

    Among several ranks a layer has some of the outputs, or some of the inputs. With some of the inputs its results are
    summed over the ranks; bias and residual are added on the first one.
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
        part_to_outputs: Mapping[str, Sequence[range]] | None = None,
        inputs: range | None = None,
        keeps_precision: bool = False,
        parts_without_bias: Collection[str] = (),
    ) -> None:
        """Sizes are those of the checkpoint's tensors.

        `is_transposed`: the checkpoint stores [in_features, out_features], as GPT-2's does.
        `part_to_row_order`: the checkpoint's row for each output of a part, for checkpoints that interleave rows.
        `part_to_outputs`: this rank's outputs of a part, counted after they are put in order; all where it is missing.
        `inputs`: this rank's inputs; None for all.
        `keeps_precision`: its weight is never quantized while it is loaded; weights of picture encoders never are.
        `parts_without_bias`: parts without a bias in the checkpoint, beside parts with one; their bias is zero.
        """
        own_outputs, orders = part_to_outputs or {}, part_to_row_order or {}
        self._part_to_rows = {
            name: _rows(size, own_outputs.get(name), orders.get(name)) for name, size in part_to_out_features.items()
        }
        self._sharding = sharding()
        self._inputs = None if self._sharding.size == 1 else inputs
        self.in_features = in_features if self._inputs is None else len(self._inputs)
        self.out_features = sum(rows.num_rows for rows in self._part_to_rows.values())
        self._stored_in_features = in_features
        self._parts = dict(part_to_out_features)
        self._name = ",".join(self._parts)
        self._is_skipped = False
        self._has_bias = has_bias and self._is_first
        self._stores_bias = has_bias
        self._is_transposed = is_transposed
        self._keeps_precision = keeps_precision
        self._dtype = dtype
        self._device = device
        self._weight: torch.Tensor | None = None  # [out_features, in_features]
        self._bias: torch.Tensor | None = None  # [out_features]
        self._stored: dict[str, AnyStoredWeight] = {}  # parts of a quantized checkpoint
        self._without_bias = frozenset(parts_without_bias)
        self._num_missing = len(self._parts) + (len(self._parts) - len(self._without_bias)) * self._has_bias
        self._packed: PackedLinear | None = None
        self._adapted = adapted_layers()
        self._adapted_number = 0
        if self._adapted is not None:
            self._adapted_number = self._adapted.num_layers
            self._adapted.add_layer(self._adapted_parts())

    def _adapted_parts(self) -> list[AdaptedPart]:
        parts: list[AdaptedPart] = []
        offset = 0
        for name, size in self._parts.items():
            rows = self._part_to_rows[name]
            sizes = (self._stored_in_features, size, offset)
            is_loaded = lambda: self._packed is not None  # noqa: E731 - it is asked after loading
            parts.append(AdaptedPart(name, self._adapted_number, *sizes, self._inputs, rows.of_plain, is_loaded))
            offset += rows.num_rows
        return parts

    @property
    def _is_first(self) -> bool:
        """Whether bias and residual are added here."""
        return self._inputs is None or self._sharding.rank == 0

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of each part's weight and bias."""
        slots: dict[str, WeightSlot] = {}
        offset = 0
        is_skipped = is_packed(self._name, (self.out_features, self.in_features))
        for name, size in self._parts.items():
            sizes, rows = (size, self._stored_in_features), self._part_to_rows[name]
            slots[f"{name}.weight"] = WeightSlot(
                sizes[::-1] if self._is_transposed else sizes,
                partial(self._load_weight, name, offset),
                load_stored=partial(self._load_stored, name, offset),
                stored_shape=sizes,
                part=self._weight_part(rows),
                skip=self._skip_weight if is_skipped else None,
            )
            if self._stores_bias and name not in self._without_bias:
                load = partial(self._load_bias, name, offset)
                bias = WeightSlot((size,), load, WeightKind.BIAS, part=rows.part)
                slots |= {f"{name}.bias": bias} if self._has_bias else unread({f"{name}.bias": bias})
            offset += rows.num_rows
        return slots

    def _weight_part(self, rows: _Rows) -> WeightPart | None:
        if self._inputs is not None:
            return WeightPart(0 if self._is_transposed else 1, (self._inputs,))
        return None if rows.part is None else WeightPart(1 if self._is_transposed else 0, rows.part.runs)

    def __call__(self, x: torch.Tensor, activation: str = "none", residual: torch.Tensor | None = None) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual: [num_tokens, in_features] to [num_tokens, out_features].

        A gated activation halves the outputs. Kernels fuse activation and addition where they can.
        """
        if self._packed is None:
            raise RuntimeError(f"the layer {', '.join(self._parts)} has no weights yet")
        if self._adapted is not None and self._adapted.changes(self._adapted_number):
            own = residual if self._is_first else None
            out = self._adapted.compute(self._packed, self._adapted_number, x, activation, own)
            return out if self._inputs is None else self._sharding.all_reduce(out)
        if self._inputs is None:
            return self._packed(x, activation, residual)
        partial_sum = self._packed(x, activation, residual if self._is_first else None)
        return self._sharding.all_reduce(partial_sum)

    def _load_weight(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        rows = self._ordered(name, tensor.t() if self._is_transposed else tensor)
        if len(self._parts) == 1:
            self._weight = rows.to(self._device, self._dtype)
        else:
            if self._weight is None:
                shape = (self.out_features, self.in_features)
                self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
                if self._device.type == "cpu":
                    advise_huge_pages(self._weight)
            self._weight[offset : offset + rows.shape[0]].copy_(rows)
        self._count_one()

    def _skip_weight(self) -> None:
        """Counts a tensor whose weight was packed before."""
        self._is_skipped = True
        self._count_one()

    def _load_stored(self, name: str, offset: int, weight: AnyStoredWeight) -> None:
        own = self._part_to_rows[name].of(weight)
        if self._inputs is not None:
            columns = weight.columns(self._inputs)
            if columns is None:  # the ranks' inputs cut through its groups
                widened = weight.dequantize(self._dtype)[:, self._inputs.start : self._inputs.stop]
                self._load_weight(name, offset, widened.t() if self._is_transposed else widened)
                return
            own = columns
        self._stored[name] = own.to(self._device)
        self._count_one()

    def _load_bias(self, name: str, offset: int, tensor: torch.Tensor) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self.out_features, dtype=self._dtype, device=self._device)
        ordered = self._ordered(name, tensor)
        self._bias[offset : offset + ordered.shape[0]].copy_(ordered)
        self._count_one()

    def _all_parts(self) -> Iterator[torch.Tensor | AnyStoredWeight]:
        offset = 0
        for name, rows in self._part_to_rows.items():
            size = rows.num_rows
            if name in self._stored:
                yield self._stored[name]
            elif self._weight is not None:
                yield self._weight[offset : offset + size]
            offset += size

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        order = self._part_to_rows[name].order
        return rows if order is None else rows[order]

    def _count_one(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._pack()

    def _pack(self) -> None:
        if self._is_skipped:
            self._packed = packed_before(self._name, self._bias)
        elif self._stored:
            self._packed = pack_parts([*self._all_parts()], self._bias, self._dtype, self._name)
        elif self._weight is not None:
            self._packed = pack(self._weight, self._bias, self._name, keeps_precision=self._keeps_precision)
        self._weight = self._bias = None
        self._stored = {}


def _rows(num_rows: int, outputs: Sequence[range] | None, order: torch.Tensor | None) -> _Rows:
    """The checkpoint's rows of some outputs; all outputs if None."""
    if outputs is None or sum(map(len, outputs)) == num_rows:
        return _Rows(num_rows, None, order)
    if order is None:
        return _Rows(sum(map(len, outputs)), WeightPart(0, tuple(outputs)))
    rows = torch.cat([order[run.start : run.stop] for run in outputs])
    read, places = torch.sort(rows)
    ends = (torch.nonzero(read.diff() != 1).flatten() + 1).tolist()
    bounds = [0, *ends, len(read)]
    runs = [range(int(read[start]), int(read[stop - 1]) + 1) for start, stop in itertools.pairwise(bounds)]
    return _Rows(len(rows), WeightPart(0, tuple(runs)), torch.argsort(places))


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
