"""Linear layers, embeddings and heads whose outputs LoRA adapters change.

As with `packing`, the choice is a context around construction: layers that are constructed inside it register their
parts by the checkpoint's names, and ask for the updates of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.activation import gelu_tanh_and_mul, silu_and_mul
from llmstack_kernels.linear import PackedLinear
from llmstack_kernels.low_rank import (
    ExpertRows,
    LowRankAdapter,
    LowRankSlots,
    Send,
    activate_rounded,
    add_low_rank_,
    add_low_rank_to_embedding_,
)

GATES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
}

ReadRows = Callable[[range], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """One of the checkpoint's matrices in a layer.

    Attributes:
        name: The name of the module in the checkpoint.
        layer: Number of the layer in adapters.
        in_features: Inputs of the whole matrix.
        out_features: Outputs of the whole matrix.
        first_output: The layer's output that the part begins with.
        inputs: The inputs that this rank has; None for all.
        outputs: From the rows of a whole matrix to those of this rank, in its order.
        is_loaded: Whether this stage computes the layer.
        is_embedding: Inputs are ids, one at a time.
        scale: Factor of the layer's outputs.
        is_base: Whether a whole matrix is the one that this rank has; None where it cannot be known.
        read_base: Makes a function from a run of the stored rows to these in float32; None if no adapter may replace
            the matrix.
    """

    name: str
    layer: int
    in_features: int
    out_features: int
    first_output: int
    inputs: range | None
    outputs: Callable[[torch.Tensor], torch.Tensor]
    is_loaded: Callable[[], bool]
    is_embedding: bool = False
    scale: float = 1.0
    is_base: Callable[[torch.Tensor], bool] | None = None
    read_base: Callable[[], ReadRows] | None = None

    @property
    def whole_rank(self) -> int:
        """The rank of an update that may change all of the matrix."""
        return self.out_features if self.is_embedding else self.in_features


@dataclass(slots=True)
class AdaptedLayers:
    """All layers of a model that adapters can change, and the adapters of the step.

    Attributes:
        parts: By the name of the module.
        stacks: Modules of experts. Of each the parameters with the matrices of all experts, in the module's order.
        num_layers: Layers that have registered.
        expert_layers: Numbers of those that are products of experts.
        slots: Adapters of the step; None until there is room for them.
        is_active: Whether a row of the step has an adapter.
        head: Number of the output head; None before it has registered.
        send: Copies arrays to the device; None where the host's own memory is read.
    """

    parts: dict[str, AdaptedPart] = field(default_factory=dict)
    stacks: dict[str, dict[str, list[AdaptedPart]]] = field(default_factory=dict)
    num_layers: int = 0
    expert_layers: set[int] = field(default_factory=set)
    slots: LowRankSlots | None = None
    is_active: bool = False
    head: int | None = None
    send: Send | None = None
    _token_slots: npt.NDArray[Any] | None = None
    _changed: set[int] = field(default_factory=set)  # layers that an adapter placed so far changes

    def add_layer(self, parts: Sequence[AdaptedPart], *, is_counted: bool = True) -> None:
        """Registers the parts of layer number `num_layers`; not counted is what another rank computes."""
        self.parts |= {part.name: part for part in parts}
        self.num_layers += is_counted

    def make_slots(self, num_slots: int, max_num_rows: int, max_rank: int, device: torch.device) -> None:
        """Makes room for `num_slots` adapters and steps of `max_num_rows` tokens."""
        whole = {part.layer: part.whole_rank for part in self.parts.values() if part.read_base is not None}
        self.slots = LowRankSlots(num_slots, self.num_layers, max_num_rows, max_rank, device, whole)

    def change_all(self) -> None:
        """Lets a step with adapters update all layers but those of experts, for each of which the host waits.

        So captured steps fit all adapters. A fused activation may have other bits on a GPU, and an adapter must not
        change those of the others.
        """
        self._changed = {*range(self.num_layers)} - self.expert_layers

    @contextmanager
    def in_fixed_places(self, num_rows: int) -> Iterator[None]:
        """Inside, steps have `num_rows` rows, of which any may have any adapter; with 0 none has one.

        No expert is updated.
        """
        slots, was_active, changed = self.slots, self.is_active, self._changed
        self.is_active, self._changed = bool(num_rows), changed - self.expert_layers
        if slots is not None:
            slots.num_fixed_rows = num_rows
        try:
            yield
        finally:
            self.is_active, self._changed = was_active, changed
            if slots is not None:
                slots.num_fixed_rows = 0

    def put(self, slot: int, adapter: LowRankAdapter | None) -> None:
        """Places an adapter for the steps to come."""
        if self.slots is not None:
            self.slots.put(slot, adapter)
        if adapter is not None:
            self._changed.update(filter(adapter.changes, range(self.num_layers)))

    @property
    def num_changed(self) -> int:
        """Number of layers that an adapter placed so far changes.

        The number never falls, so a changed number means a changed set of layers.
        """
        return len(self._changed)

    def changes(self, layer: int | None) -> bool:
        """Whether the outputs of a layer are to be updated in this step; otherwise its packed weights suffice."""
        return self.is_active and layer in self._changed

    def begin_step(self, token_slots: npt.NDArray[Any] | None) -> None:
        """Orders the tokens of a step by their slots, -1 for a token without; None if none has one."""
        self._token_slots = token_slots
        self._group(token_slots)

    def select(self, tokens: torch.Tensor) -> None:
        """Orders rows for the output head, given by their places among the tokens of the step: int64 [num_rows].

        The host waits for a GPU here, but only where an adapter changes the head.
        """
        if self._token_slots is not None and self._changes_head():
            self._group(self._token_slots[tokens.cpu().numpy()])

    def _group(self, row_slots: npt.NDArray[Any] | None) -> None:
        self.is_active = row_slots is not None and self.slots is not None and self.slots.group(row_slots, self.send)

    def rows_of_experts(
        self, runs: Sequence[range], places: torch.Tensor, tokens: torch.Tensor | None
    ) -> ExpertRows | None:
        """The rows of a layer of experts in the order of their factors; None where no adapter of the step changes them.

        The host waits for a GPU here.

        Args:
            runs: Numbers of the layer's products.
            places: The expert of each choice, counted from the first of this rank: [num_tokens, num_choices].
            tokens: Which tokens of the step these are; None for all.
        """
        slots, token_slots = self.slots, self._token_slots
        if not self.is_active or slots is None or token_slots is None:
            return None
        if all(self._changed.isdisjoint(run) for run in runs):
            return None
        own = token_slots if tokens is None else token_slots[tokens.cpu().numpy()]
        rows = ExpertRows(slots, np.repeat(own, places.shape[1]), places.reshape(-1).cpu().numpy())
        return rows if rows.host_tiles else None

    def _changes_head(self) -> bool:
        """Whether an adapter in a slot does; if none does, the head needs no order of its rows."""
        head, slots = self.head, self.slots
        if head is None or slots is None:
            return False
        return any(adapter is not None and adapter.changes(head) for adapter in slots.adapters)

    def update_embedding(self, vectors: torch.Tensor, layer: int, ids: torch.Tensor, num_ids: int) -> None:
        """Adds the updates of the step to the vectors of its tokens."""
        if self.slots is not None:
            add_low_rank_to_embedding_(vectors, ids.contiguous(), self.slots, layer, num_ids)

    def update_head(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Adds the updates of the selected rows to their logits."""
        if self.slots is not None and self.head is not None:
            add_low_rank_(logits, hidden, self.slots, self.head)

    def compute(
        self, packed: PackedLinear, layer: int, x: torch.Tensor, activation: str, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """activation(x Wᵀ + b + update) + residual. Rows without an adapter have the bits of the packed layer alone."""
        if self.slots is None:
            return packed(x, activation, residual)
        if activation == "none":
            out = packed(x, residual=residual)
            add_low_rank_(out, x, self.slots, layer)
            return out
        gate = GATES.get(activation)
        if gate is not None and x.device.type == "cpu":
            out = packed(x)
            add_low_rank_(out, x, self.slots, layer)
            out = gate(out)
        else:  # as the fused epilogue: no rounding before the activation
            out = packed(x, out_dtype=torch.float32)
            add_low_rank_(out, x, self.slots, layer)
            out = activate_rounded(out, activation, x.dtype) if gate is None else gate(out).to(x.dtype)
        return out if residual is None else out + residual


_adapted: ContextVar[AdaptedLayers | None] = ContextVar("_adapted", default=None)


@contextmanager
def adapted(layers: AdaptedLayers | None) -> Iterator[None]:
    """Linear layers that are constructed inside the block register with `layers`."""
    token = _adapted.set(layers)
    try:
        yield
    finally:
        _adapted.reset(token)


def adapted_layers() -> AdaptedLayers | None:
    """The registry of layers for adapters in this context; None without adapters."""
    return _adapted.get()
