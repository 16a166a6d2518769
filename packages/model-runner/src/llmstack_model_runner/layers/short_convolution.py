"""The gated short convolution of LFM2; its state is a few earlier inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, number_slot, states_of_rows, tap_slot
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots


@dataclass(frozen=True, slots=True)
class ShortConvolutionSettings:
    """Sizes of a short convolution over as many channels as hidden states have.

    Attributes:
        length: Inputs that the convolution takes, the token's own included; at least 2.
        has_bias: The convolution and its projections have biases.
    """

    num_channels: int
    length: int
    has_bias: bool = False

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs before the next token, of this rank's channels."""
        shape = (self.length - 1, len(sharding().share(self.num_channels)))
        return (StateTensor("convolution_tail", shape, str(dtype).removeprefix("torch.")),)

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> ShortConvolution:
        """The convolution without weights."""
        return ShortConvolution(f"{prefix}conv.", self, dtype, device)


class ShortConvolution(Mixer):
    """out(c * convolve(b * x)), where b, c and x are projections of a token, each channel on its own.

    The convolution of a token takes its own input and the `length` - 1 inputs before it, which are the state. Sums have
    one order, tap after tap in float32, so the bits of a token do not depend on how its prompt is cut into steps.

    Among several ranks each has some of the channels.
    """

    def __init__(
        self, prefix: str, settings: ShortConvolutionSettings, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.conv.`."""
        self._name = f"{prefix}conv"
        self._size = size = settings.num_channels
        has_bias = settings.has_bias
        self._own = own = sharding().share(size)
        parts = {f"{prefix}in_proj": 3 * size}
        outputs = [range(own.start + start, own.stop + start) for start in (0, size, 2 * size)]
        self._in = Linear(
            size, parts, has_bias=has_bias, dtype=dtype, device=device, part_to_outputs=dict.fromkeys(parts, outputs)
        )
        self._out = Linear(size, {f"{prefix}out_proj": size}, has_bias=has_bias, dtype=dtype, device=device, inputs=own)
        self._taps = torch.zeros(settings.length, len(own), device=device)
        self._bias = torch.zeros(len(own), device=device) if has_bias else None

    def slots(self) -> dict[str, WeightSlot]:
        slots = tap_slot(f"{self._name}.weight", self._taps, self._size, [self._own])
        if self._bias is not None:
            slots |= number_slot(f"{self._name}.bias", self._bias, self._size, [self._own])
        return slots | collect_slots([self._in, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: tails [num_state_blocks, length - 1, channels]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        (tails,), rows = step.kv_cache, states_of_rows(step.metadata)
        before, gate, inputs = self._in(x).chunk(3, dim=-1)
        inputs = before * inputs
        return self._out(gate * causal_convolution(inputs, self._taps, self._bias, tails, rows))
