"""Mixture-of-experts feed-forward: a router chooses and weights experts per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from llmstack_kernels.activation import relu_squared
from llmstack_kernels.grouped_linear import (
    PackedExperts,
    are_one_tensor,
    group_rows,
    grouped_linear,
    join_experts,
    pack_experts,
    sum_choices,
)
from llmstack_kernels.linear import AnyStoredWeight, PackedLinear, join_stored, pack_linear
from llmstack_model_runner.layers.adaptation import GATES
from llmstack_model_runner.layers.adapted_experts import AdaptedExperts, ExpertMatrix
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.layers.linear import gated_activation, linear_activation
from llmstack_model_runner.layers.mixer import number_slot
from llmstack_model_runner.layers.packing import (
    are_packed,
    experts_packed_before,
    keep_experts,
    pack_parts,
    pack_stored,
    packing,
)
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, unread

_ACTIVATIONS = {**GATES, "relu_squared": relu_squared}


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """Sizes of a layer of experts, and the checkpoint's names of its parts.

    Attributes:
        num_experts: Number of experts.
        num_choices: Number of experts that compute each token.
        inner_size: Inner size of an expert.
        is_normalised: The weights of a token's experts are divided by their sum.
        name: Name of the layer, such as `mlp`; the router is `gate` in it, the experts are `experts.0` and so on.
        gate_name: Name of an expert's gate projection; None for experts without gates.
        up_name: Name of an expert's up projection.
        down_name: Name of an expert's down projection.
        shared_size: Inner size of the experts beside them that compute every token, as one; 0 for none.
        gated_shared_size: That of one with a gate.
        router_size: Width of what the router sees, where it is not what the experts compute; 0 where it is.
        has_scales: The weights of chosen experts are multiplied by one number of each expert.
        routing: Choice within groups of experts; `is_normalised` has then no meaning. None: the most likely experts.
    """

    num_experts: int
    num_choices: int
    inner_size: int
    is_normalised: bool
    name: str = "mlp"
    gate_name: str | None = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"
    routing: GroupedRouting | None = None
    shared_size: int = 0
    gated_shared_size: int = 0
    router_size: int = 0
    has_scales: bool = False

    @property
    def first_names(self) -> list[str]:
        """Names of the projections whose outputs the first product has."""
        return [self.up_name] if self.gate_name is None else [self.gate_name, self.up_name]


class Experts:
    """down(activation(gate(x)) * up(x)) of each chosen expert, summed with the router's weights in float32.

    Without gates it is down(activation(up(x))).

    The router is not quantized, since it is small and its choices are sensitive to rounding.

    Attributes:
        on_choice: Receives each layer's name and the experts that it chooses, [num_tokens, num_choices], while those of
            all layers are recorded; else None.
    """

    on_choice: ClassVar[Callable[[str, torch.Tensor], None] | None] = None

    def __init__(
        self,
        prefix: str,
        size: int,
        activation: str,
        settings: ExpertSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is the prefix of the block's tensors, such as `model.layers.0.`."""
        self._sharding = own = sharding()
        self._experts = own.share(settings.num_experts) if own.is_expert_parallel else range(settings.num_experts)
        self._inner = range(settings.inner_size) if own.is_expert_parallel else own.share(settings.inner_size)
        num_experts, inner_size = len(self._experts), len(self._inner)
        self._name = prefix + settings.name
        self._settings = settings
        self._activation = (linear_activation if settings.gate_name is None else gated_activation)(activation)
        self._router: PackedLinear | None = None
        routing = settings.routing
        is_corrected = routing is not None and routing.is_corrected
        self._correction = torch.zeros(settings.num_experts, device=device) if is_corrected else None
        self._scales = torch.ones(settings.num_experts, device=device) if settings.has_scales else None
        self._make_stacks(num_experts, inner_size, size, dtype, device)
        self._dtype = dtype
        self._device = device
        name, is_loaded = f"{self._name}.experts", lambda: self._router is not None  # it is asked after loading
        self._adapted = AdaptedExperts(name, self._experts, settings.num_experts, self._matrices(size), is_loaded)

    def _make_stacks(
        self, num_experts: int, inner_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        names, num_parts = [f"{self._name}.experts.{part}" for part in ("gate_up", "down")], self._num_parts
        first = (num_experts, num_parts * inner_size, size)
        self._gate_up = _Stack(names[0], first, dtype, device, num_parts=num_parts)
        self._down = _Stack(names[1], (num_experts, size, inner_size), dtype, device, num_parts=1)

    @property
    def _num_parts(self) -> int:
        """Projections whose outputs the first product has."""
        return len(self._settings.first_names)

    @property
    def _is_cut(self) -> bool:
        """Whether this rank has a part of each expert."""
        return len(self._inner) < self._settings.inner_size

    def _matrices(self, size: int) -> Sequence[Sequence[ExpertMatrix]]:
        """The matrices of both products, as adapters know them."""
        settings, inner = self._settings, self._inner
        num_inner, own = settings.inner_size, slice(inner.start, inner.stop)
        inputs, num_parts = inner if self._is_cut else None, self._num_parts
        return [
            [
                ExpertMatrix(
                    "up_proj" if settings.gate_name is None else "gate_up_proj",
                    (size, num_parts * num_inner),
                    is_stacked=True,
                    outputs=lambda rows: torch.cat([part[own] for part in rows.chunk(num_parts)]),
                ),
                *(
                    ExpertMatrix(
                        name,
                        (size, num_inner),
                        is_stacked=False,
                        outputs=lambda rows: rows[own],
                        first_output=number * len(inner),
                    )
                    for number, name in enumerate(settings.first_names)
                ),
            ],
            [
                ExpertMatrix("down_proj", (num_inner, size), is_stacked=True, inputs=inputs),
                ExpertMatrix(settings.down_name, (num_inner, size), is_stacked=False, inputs=inputs),
            ],
        ]

    def slots(self) -> dict[str, WeightSlot]:
        """The router, and the projections of each expert."""
        settings, size = self._settings, self._down.shape[1]
        inner, outer = (settings.inner_size, size), (size, settings.inner_size)
        router = (settings.num_experts, settings.router_size or size)
        slots = {f"{self._name}.gate.weight": WeightSlot(router, self._load_router)}
        if self._correction is not None:
            name, shape = f"{self._name}.gate.e_score_correction_bias", (settings.num_experts,)
            slots[name] = WeightSlot(shape, self._load_correction, WeightKind.BIAS)
        if self._scales is not None:
            slots |= number_slot(f"{self._name}.gate.scales", self._scales, settings.num_experts, [])
        rows, columns = (WeightPart(dim, (self._inner,)) if self._is_cut else None for dim in (0, 1))
        stacks = [self._gate_up, self._down]
        gate_up, down = (partial(stack.slot, is_known=stack.is_known) for stack in stacks)
        for expert in range(settings.num_experts):
            place, prefix = expert - self._experts.start, f"{self._name}.experts.{expert}."
            found = {
                f"{prefix}{name}.weight": gate_up(inner, place, part, rows)
                for part, name in enumerate(settings.first_names)
            }
            found[f"{prefix}{settings.down_name}.weight"] = down(outer, place, 0, columns)
            slots |= found if expert in self._experts else unread(found)
        return slots

    def __call__(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size].

        `seen`: What the router sees, [num_tokens, router_size]; `x` if None.
        """
        if self._router is None:
            raise RuntimeError(f"{self._name} has no weights yet")
        seen = x if seen is None else seen
        shares, expert_ids = self._choose(self._router(seen.to(self._router_dtype), out_dtype=torch.float32))
        if Experts.on_choice is not None:
            Experts.on_choice(self._name, expert_ids)
        if self._sharding.size > 1 and self._sharding.is_expert_parallel:
            return self._sharding.all_reduce(self._compute_own(x, shares, expert_ids))
        return self._sharding.all_reduce(sum_choices(self._compute(x, expert_ids), shares))

    def _compute(self, x: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs of all choices, given the places of their experts among this rank's: [num_rows, size].

        `tokens`: The tokens of the step that `x` has; None for all.
        """
        groups, updates = group_rows(places, len(self._experts)), self._adapted.updates(places, tokens)
        gate_up, down = self._gate_up.packed, self._down.packed
        if updates is None:
            return grouped_linear(grouped_linear(x, gate_up, groups, self._activation), down, groups)
        inner = _ACTIVATIONS[self._activation](updates.add(grouped_linear(x, gate_up, groups), x, 0))
        return updates.add(grouped_linear(inner, down, groups), inner, 1)

    def _compute_own(self, x: torch.Tensor, shares: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """The sum of the choices of this rank's experts, choice after choice in float32."""
        places = expert_ids - self._experts.start
        is_own = (places >= 0) & (places < len(self._experts))
        if are_one_tensor(x.device.type):  # a captured step has the same rows always, and computes its own
            no_expert = 0 if self._adapted.is_enabled else len(self._experts)
            rows = self._compute(x, places.masked_fill(~is_own, no_expert))
            return sum_choices(rows, shares.masked_fill(~is_own, 0.0))
        tokens, choices = torch.nonzero(is_own, as_tuple=True)
        summed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if len(tokens):
            rows = self._compute(x[tokens], places[tokens, choices][:, None], tokens).float()
            summed.index_add_(0, tokens, rows * shares[tokens, choices][:, None])
        return summed.to(x.dtype)

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of the chosen experts, each [num_tokens, num_choices]."""
        shares, expert_ids = self._choose_unscaled(logits)
        return shares if self._scales is None else shares * self._scales[expert_ids], expert_ids

    def _choose_unscaled(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self._settings.routing
        if routing is not None:
            return routing.choose(logits, self._correction, self._settings.num_choices)
        if self._settings.is_normalised:  # equals a softmax over all experts, divided by the sum over the chosen ones
            chosen, expert_ids = torch.topk(logits, self._settings.num_choices, dim=-1)
            return torch.softmax(chosen, dim=-1), expert_ids
        shares, expert_ids = torch.topk(torch.softmax(logits, dim=-1), self._settings.num_choices, dim=-1)
        return shares, expert_ids

    @property
    def _router_dtype(self) -> torch.dtype:
        """Float32 where experts are chosen by their own scores' sums, as such models were trained."""
        return self._dtype if self._settings.routing is None else torch.float32

    def _load_correction(self, tensor: torch.Tensor) -> None:
        if self._correction is not None:
            self._correction.copy_(tensor)

    def _load_router(self, tensor: torch.Tensor) -> None:
        weight = tensor.to(self._device, self._router_dtype, copy=True)
        self._router = pack_linear(weight, None, None, packing().is_batch_invariant)


class _Stack:
    """One projection of all experts, packed when its last part is loaded."""

    def __init__(
        self, name: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, num_parts: int
    ) -> None:
        """`shape` is [num_experts, out_features, in_features]; outputs are the concatenation of equal parts."""
        self._name = name
        self.shape = shape
        self._num_parts = num_parts
        self._num_missing = shape[0] * num_parts
        self._dtype = dtype
        self._device = device
        self._weights: torch.Tensor | None = None
        self._stored: dict[int, dict[int, AnyStoredWeight]] = {}  # expert to its parts of a quantized checkpoint
        self._packed_experts: dict[int, PackedLinear] = {}
        self._packed: PackedExperts | None = None

    @property
    def is_known(self) -> bool:
        """Whether all experts were packed before."""
        return are_packed(self._name, self.shape)

    def slot(
        self, shape: tuple[int, int], expert: int, part: int, own: WeightPart | None, *, is_known: bool
    ) -> WeightSlot:
        """The slot of a part of an expert, of which this rank has `own`; None for all of it."""
        load_stored = partial(self.load_stored, expert, part, own)
        skip = self._count_one if is_known else None
        return WeightSlot(shape, partial(self.load, expert, part), load_stored=load_stored, part=own, skip=skip)

    @property
    def packed(self) -> PackedExperts:
        """The packed weights; RuntimeError before all parts are loaded."""
        if self._packed is None:
            raise RuntimeError("the experts have no weights yet")
        return self._packed

    def load(self, expert: int, part: int, tensor: torch.Tensor) -> None:
        """Loads a part [out_features / num_parts, in_features] of an expert."""
        self._fill(expert, part, tensor)
        self._count_one()

    def load_stored(self, expert: int, part: int, own: WeightPart | None, weight: AnyStoredWeight) -> None:
        """Loads a quantized part; an expert is packed as soon as it has all of them, on a GPU with all others.

        What ranks cannot cut is widened.
        """
        cut: AnyStoredWeight | None = weight
        if own is not None:
            (run,) = own.runs
            cut = weight.columns(run) if own.dim else weight.rows(slice(run.start, run.stop))
        if cut is None:
            widened = weight.to(self._device).dequantize(self._dtype)
            self.load(expert, part, widened if own is None else own.read(widened))
            return
        parts = self._stored.setdefault(expert, {})
        parts[part] = cut.to(self._device) if self._is_apart else cut
        if self._is_apart and len(parts) == self._num_parts:
            ordered = [parts[index] for index in range(self._num_parts)]
            self._packed_experts[expert] = pack_parts(ordered, None, self._dtype)
            self._stored[expert] = {}
        self._count_one()

    def _count_one(self) -> None:
        self._num_missing -= 1
        if self._num_missing:
            return
        if self.is_known:
            self._packed = experts_packed_before(self._name, self.shape[0])
            return
        packed = self._pack_stored() if self._stored else None
        if packed is None and self._weights is not None:
            chosen = packing()
            packed = pack_experts(self._weights, chosen.quantization, chosen.is_batch_invariant)
        if packed is not None:
            self._packed = keep_experts(self._name, packed)
        self._weights = None
        self._stored, self._packed_experts = {}, {}

    @property
    def _is_apart(self) -> bool:
        """Whether each expert is packed by itself, in whatever format it has."""
        return not are_one_tensor(self._device.type)

    def _pack_stored(self) -> PackedExperts | None:
        """The experts as the checkpoint stores them; None after widening, where one tensor cannot have them."""
        if self._is_apart:
            return join_experts([self._packed_experts.get(n) or self._pack_mixed(n) for n in range(self.shape[0])])
        parts = [self._stored.get(expert, {}) for expert in range(self.shape[0])]
        if self._weights is None and all(len(own) == self._num_parts for own in parts):
            joined = [join_stored([own[part] for part in range(self._num_parts)]) for own in parts]
            whole = [weight for weight in joined if weight is not None]
            if len(whole) == len(joined) and (packed := pack_stored(whole, self._dtype, self._device)):
                return packed
        for expert, own in enumerate(parts):
            for part, weight in own.items():
                self._fill(expert, part, weight.to(self._device).dequantize(self._dtype))
        return None

    def _fill(self, expert: int, part: int, tensor: torch.Tensor) -> None:
        if self._weights is None:
            self._weights = torch.empty(self.shape, dtype=self._dtype, device=self._device)
        self._weights[expert].chunk(self._num_parts)[part].copy_(tensor)

    def _pack_mixed(self, expert: int) -> PackedLinear:
        """An expert with parts in full precision."""
        plain = [] if self._weights is None else self._weights[expert].chunk(self._num_parts)
        stored = self._stored.get(expert, {})
        return pack_parts([stored.get(part, tensor) for part, tensor in enumerate(plain)], None, self._dtype)
