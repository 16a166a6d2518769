"""The gated short convolution of LFM2; its state is a few earlier inputs."""

from __future__ import annotations

import torch

from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, collect_slots


class ShortConvolution:
    """out(c * convolve(b * x)), where b, c and x are projections of a token, each channel on its own.

    The convolution of a token takes its own input and the `length` - 1 inputs before it, which are the state. Sums have
    one order, tap after tap in float32, so the bits of a token do not depend on how its prompt is cut into steps.

    Among several ranks each has some of the channels.
    """

    def __init__(
        self, prefix: str, size: int, length: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.conv.`."""
        self._name = f"{prefix}conv"
        self._size, self._length = size, length
        self._own = own = sharding().share(size)
        parts = {f"{prefix}in_proj": 3 * size}
        outputs = [range(own.start + start, own.stop + start) for start in (0, size, 2 * size)]
        self._in = Linear(
            size, parts, has_bias=has_bias, dtype=dtype, device=device, part_to_outputs=dict.fromkeys(parts, outputs)
        )
        self._out = Linear(size, {f"{prefix}out_proj": size}, has_bias=has_bias, dtype=dtype, device=device, inputs=own)
        self._taps = torch.zeros(length, len(own), device=device)
        self._bias = torch.zeros(len(own), device=device) if has_bias else None

    def slots(self) -> dict[str, WeightSlot]:
        part = None if len(self._own) == self._size else WeightPart(0, (self._own,))
        shape = (self._size, 1, self._length)
        slots = {f"{self._name}.weight": WeightSlot(shape, self._load_taps, WeightKind.SCALE, part=part)}
        if self._bias is not None:
            slots[f"{self._name}.bias"] = WeightSlot((self._size,), self._load_bias, WeightKind.BIAS, part=part)
        return slots | collect_slots([self._in, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        tails: torch.Tensor,  # [num_state_blocks, length - 1, channels]
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows in `tails`."""
        if metadata.states is None:
            raise ValueError("the rows of the step have no states")
        before, gate, inputs = self._in(x).chunk(3, dim=-1)
        inputs = before * inputs
        return self._out(gate * causal_convolution(inputs, self._taps, self._bias, tails, metadata.states))

    def _load_taps(self, tensor: torch.Tensor) -> None:
        self._taps.copy_(tensor[:, 0].T)

    def _load_bias(self, tensor: torch.Tensor) -> None:
        if self._bias is not None:
            self._bias.copy_(tensor)
