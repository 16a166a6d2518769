"""The state space layer of Mamba-1.

Its state is some numbers per channel, and the last few inputs of a convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from llmstack_kernels.activation import silu_gate
from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_kernels.selective_scan import SelectiveInputs, selective_scan
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, number_slot, states_of_rows, tap_slot
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, collect_slots


@dataclass(frozen=True, slots=True)
class SelectiveSettings:
    """Sizes and variants of a layer.

    Attributes:
        inner_size: Channels.
        state_size: Numbers of a channel's state.
        rank: Numbers that the steps of all channels are made of.
        length: Inputs that the convolution takes, the token's own included; at least 2.
        norms: Of what steps, B and C are made of; `plain` ones have no scale.
        norm_eps: That of these norms.
        name: Of the layer in its block.
    """

    inner_size: int
    state_size: int
    rank: int
    length: int
    has_projection_bias: bool = False
    has_convolution_bias: bool = True
    norms: Literal["none", "plain", "scaled"] = "none"
    norm_eps: float = 1e-6
    name: str = "mixer"

    def check(self) -> SelectiveSettings:
        """The settings; ValueError if the convolution has no earlier input."""
        if self.length < 2:
            raise ValueError(
                f"config.json: the convolution of mamba must have a length of at least 2, got {self.length}."
            )
        return self

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs before the next token and the states, of this rank's channels."""
        count = len(sharding().share(self.inner_size))
        return (
            StateTensor("last_inputs", (self.length - 1, count), str(dtype).removeprefix("torch.")),
            StateTensor("channel_states", (self.state_size, count), "float32"),
        )

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> SelectiveSpace:
        """The layer without weights."""
        return SelectiveSpace(f"{prefix}{self.name}.", size, self, dtype, device)


class SelectiveSpace(Mixer):
    """out(scan(convolve(x)) * silu(z)), where x and z are projections. Steps, B and C are some of what is scanned.

    Among several ranks each has some of the channels.
    """

    def __init__(
        self, prefix: str, size: int, settings: SelectiveSettings, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.mixer.`."""
        self._prefix, self._settings = prefix, settings
        inner, has_bias = settings.inner_size, settings.has_projection_bias
        own = self._own = sharding().share(inner)
        self._sizes = [settings.rank, settings.state_size, settings.state_size]

        def linear(in_features: int, name: str, outputs: int, has_bias: bool = False, **layout: object) -> Linear:
            parts = {f"{prefix}{name}": outputs}
            return Linear(in_features, parts, has_bias=has_bias, dtype=dtype, device=device, **layout)  # type: ignore[arg-type]

        both = {f"{prefix}in_proj": [own, range(own.start + inner, own.stop + inner)]}
        self._in = linear(size, "in_proj", 2 * inner, has_bias, part_to_outputs=both)
        self._selection = linear(inner, "x_proj", sum(self._sizes), inputs=own)
        self._steps = linear(settings.rank, "dt_proj", inner, part_to_outputs={f"{prefix}dt_proj": [own]})
        self._out = linear(inner, "out_proj", size, has_bias, inputs=own)
        self._taps = torch.zeros(settings.length, len(own), device=device)
        self._tap_bias = torch.zeros(len(own), device=device) if settings.has_convolution_bias else None
        self._log_decay = torch.zeros(settings.state_size, len(own), device=device)
        self._step_bias, self._skip = (torch.zeros(len(own), device=device) for _ in range(2))
        has_scale = settings.norms == "scaled"
        self._norms = [
            RMSNorm(f"{prefix}{n}_layernorm", width, settings.norm_eps, dtype=dtype, device=device, has_scale=has_scale)
            for n, width in zip(("dt", "b", "c"), self._sizes, strict=True)
            if settings.norms != "none"
        ]

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections, the convolution, the recurrence and the norms."""
        whole, prefix, own = self._settings, self._prefix, self._own
        slots = tap_slot(f"{prefix}conv1d.weight", self._taps, whole.inner_size, [own])
        biases = [("conv1d.bias", self._tap_bias), ("dt_proj.bias", self._step_bias), ("D", self._skip)]
        for name, target in biases:
            if target is not None:
                slots |= number_slot(f"{prefix}{name}", target, whole.inner_size, [own])
        part = None if len(own) == whole.inner_size else WeightPart(0, (own,))
        load = partial(_copy_transposed, self._log_decay)
        slots[f"{prefix}A_log"] = WeightSlot((whole.inner_size, whole.state_size), load, WeightKind.BIAS, part=part)
        return slots | collect_slots([self._in, self._selection, self._steps, *self._norms, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: [num_blocks, length - 1, channels], and [num_blocks, state_size, channels]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        (tails, states), rows = step.kv_cache, states_of_rows(step.metadata)
        inputs, gate = self._in(x).split([len(self._own)] * 2, -1)
        mixed = causal_convolution(inputs, self._taps, self._tap_bias, tails, rows, "silu")
        chosen = self._selection(mixed).split(self._sizes, -1)
        if self._norms:
            chosen = tuple(norm(part.unsqueeze(1)).squeeze(1) for norm, part in zip(self._norms, chosen, strict=True))
        steps, taken, asked = chosen
        scanned = SelectiveInputs(mixed, self._steps(steps), taken, asked, self._log_decay, self._step_bias, self._skip)
        return self._out(silu_gate(selective_scan(scanned, states, rows), gate))


def _copy_transposed(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor.T)
