"""The state space layer of Mamba-2.

Its state is a matrix per head, and the last few inputs of a convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from llmstack_kernels.activation import silu_gate
from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_kernels.rms_norm import gated_rms_norm
from llmstack_kernels.state_space_scan import ScanInputs, state_space_scan
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, number_slot, states_of_rows, tap_slot
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.sharding import sharding, spread
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot, collect_slots


@dataclass(frozen=True, slots=True)
class StateSpaceSettings:
    """Sizes and variants of a state space layer.

    Attributes:
        num_groups: Groups of heads, each of which has one B and one C, and is normalised by itself.
        state_size: Rows of a head's matrix.
        length: Inputs that the convolution takes, the token's own included; at least 2.
        norm: Whether the output is normalised, behind the gate or before it.
        limits: Least and largest step.
        scales: Factors of the projections to z, x, B, C and steps.
        name: Of the layer in its block.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    length: int
    has_projection_bias: bool = False
    has_out_bias: bool = False
    has_convolution_bias: bool = True
    norm: Literal["none", "behind_gate", "before_gate"] = "behind_gate"
    limits: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, ...] = (1.0,) * 5
    name: str = "mamba"

    def of_rank(self) -> StateSpaceSettings:
        """The heads that this context's rank has, and their groups; ValueError if they cannot be shared out."""
        heads, groups = sharding().heads(self.num_heads, self.num_groups)
        return replace(self, num_heads=len(heads), num_groups=len(groups))

    @property
    def inner_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Inputs of the convolution: x, B and C of a token."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs before the next token and the matrices, of this rank's heads."""
        own = self.of_rank()
        tail, matrices = (own.length - 1, own.num_channels), (own.num_heads, own.state_size, own.head_dim)
        return (
            StateTensor("last_inputs", tail, str(dtype).removeprefix("torch.")),
            StateTensor("state_matrices", matrices, "float32"),
        )

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> StateSpace:
        """The layer without weights."""
        return StateSpace(f"{prefix}{self.name}.", size, self, eps, dtype, device)


class StateSpace(Mixer):
    """out(norm(scan(convolve(x, B, C)) * silu(z))), where z, x, B, C and the steps are projections.

    Among several ranks each has some of the heads, with their groups.
    """

    def __init__(
        self,
        prefix: str,
        size: int,
        settings: StateSpaceSettings,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.mamba.`."""
        self._prefix, self._settings, self._own, self._eps = prefix, settings, settings.of_rank(), eps
        self._sharding = sharding()
        self._heads, groups = self._sharding.heads(settings.num_heads, settings.num_groups)
        self._values = spread(self._heads, settings.head_dim)
        outputs = _outputs(settings, self._heads, groups)
        self._channels = [
            range(run.start - settings.inner_size, run.stop - settings.inner_size) for run in outputs[1:4]
        ]
        parts = {f"{prefix}in_proj": settings.inner_size + settings.num_channels + settings.num_heads}
        self._in = Linear(
            size,
            parts,
            has_bias=settings.has_projection_bias,
            dtype=dtype,
            device=device,
            part_to_outputs=dict.fromkeys(parts, outputs),
        )
        factors = [torch.full((len(run),), scale) for run, scale in zip(outputs, settings.scales, strict=True)]
        self._scale = Scale(torch.cat(factors), device)
        self._taps = torch.zeros(settings.length, self._own.num_channels, device=device)
        self._tap_bias = torch.zeros(self._own.num_channels, device=device) if settings.has_convolution_bias else None
        self._log_decay, self._step_bias, self._skip = (
            torch.zeros(self._own.num_heads, device=device) for _ in range(3)
        )
        # A group whose heads several ranks have is normalised on all of them.
        self._is_gathered = settings.num_groups < self._sharding.size
        num_normed = settings.inner_size if self._is_gathered else self._own.inner_size
        self._norm = None if settings.norm == "none" else torch.zeros(num_normed, dtype=dtype, device=device)
        out = {f"{prefix}out_proj": size}
        self._out = Linear(
            settings.inner_size, out, has_bias=settings.has_out_bias, dtype=dtype, device=device, inputs=self._values
        )

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections, the convolution, the recurrence and the norm."""
        whole, prefix, channels = self._settings, self._prefix, self._channels
        slots = tap_slot(f"{prefix}conv1d.weight", self._taps, whole.num_channels, channels)
        if self._tap_bias is not None:
            slots |= number_slot(f"{prefix}conv1d.bias", self._tap_bias, whole.num_channels, channels)
        for name, target in (("A_log", self._log_decay), ("dt_bias", self._step_bias), ("D", self._skip)):
            slots |= number_slot(f"{prefix}{name}", target, whole.num_heads, [self._heads])
        if self._norm is not None:
            name = f"{prefix}norm.weight"
            slots |= number_slot(name, self._norm, whole.inner_size, [self._values], WeightKind.SCALE)
        return slots | collect_slots([self._in, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: [num_blocks, length - 1, channels], and [num_blocks, heads, state_size, head_dim]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        (tails, matrices), own, rows = step.kv_cache, self._own, states_of_rows(step.metadata)
        projected = self._scale(self._in(x))
        gate, mixed, steps = projected.split([own.inner_size, own.num_channels, own.num_heads], -1)
        mixed = causal_convolution(mixed, self._taps, self._tap_bias, tails, rows, "silu")
        inputs = ScanInputs(
            mixed, steps, self._log_decay, self._step_bias, self._skip, own.num_groups, self._settings.limits
        )
        return self._out(self._gated(state_space_scan(inputs, matrices, rows), gate))

    def _gated(self, answers: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The answers times silu(gate), normalised: [num_tokens, inner_size] of this rank."""
        if self._norm is None:
            return silu_gate(answers, gate)
        num_groups, total = self._own.num_groups, self._settings.inner_size
        if self._is_gathered:
            answers, gate = (self._sharding.all_gather(part.contiguous(), total) for part in (answers, gate))
            num_groups = self._settings.num_groups
        groups = (len(answers), num_groups, -1)
        normed = gated_rms_norm(
            answers.view(groups),
            gate.view(groups),
            self._norm.view(num_groups, -1),
            self._eps,
            is_gated_first=self._settings.norm == "behind_gate",
        ).view(answers.shape)
        return normed[:, self._values.start : self._values.stop].contiguous() if self._is_gathered else normed


def _outputs(settings: StateSpaceSettings, heads: range, groups: range) -> list[range]:
    """The outputs of the projection to z, x, B, C and steps, of some heads and their groups."""
    values, rows = spread(heads, settings.head_dim), spread(groups, settings.state_size)
    num_rows = settings.num_groups * settings.state_size
    runs, start = [], 0
    for own, total in ((values, settings.inner_size),) * 2 + ((rows, num_rows),) * 2 + ((heads, settings.num_heads),):
        runs.append(range(own.start + start, own.stop + start))
        start += total
    return runs
