"""Feed-forwards: the gated one of the Llama family, and one without a gate."""

from __future__ import annotations

import torch

from llmstack_model_runner.layers.linear import Linear, gated_activation, linear_activation
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots


class GatedFeedForward:
    """down(activation(gate(x)) * up(x)), with gate and up computed as one product."""

    def __init__(
        self,
        prefix: str,
        size: int,
        inner_size: int,
        activation: str,
        *,
        has_bias: bool,
        is_joined: bool,
        dtype: torch.dtype,
        device: torch.device,
        name: str = "mlp",
    ) -> None:
        """`prefix` is that of the block's tensors, and `name` is the layer's own.

        With `is_joined` the checkpoint has one tensor for gate and up.
        """
        own = sharding().share(inner_size)
        names = {"gate_up_proj": 2 * inner_size} if is_joined else {"gate_proj": inner_size, "up_proj": inner_size}
        parts = {f"{prefix}{name}.{part}": out_features for part, out_features in names.items()}
        outputs = [own, range(own.start + inner_size, own.stop + inner_size)] if is_joined else [own]
        self._gate_up = Linear(
            size, parts, has_bias=has_bias, dtype=dtype, device=device, part_to_outputs=dict.fromkeys(parts, outputs)
        )
        down = {f"{prefix}{name}.down_proj": size}
        self._down = Linear(inner_size, down, has_bias=has_bias, dtype=dtype, device=device, inputs=own)
        self._activation = gated_activation(activation)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._gate_up, self._down])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size]."""
        return self._down(self._gate_up(x, self._activation))


class PlainFeedForward:
    """A feed-forward without a gate: down(activation(up(x)))."""

    def __init__(
        self,
        name: str,
        size: int,
        inner_size: int,
        activation: str,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`name` is that of the layer's tensors, such as `model.layers.0.mixer`."""
        own, up, down = sharding().share(inner_size), {f"{name}.up_proj": inner_size}, {f"{name}.down_proj": size}
        outputs = {part: [own] for part in up}
        self._up = Linear(size, up, has_bias=has_bias, dtype=dtype, device=device, part_to_outputs=outputs)
        self._down = Linear(inner_size, down, has_bias=has_bias, dtype=dtype, device=device, inputs=own)
        self._activation = linear_activation(activation)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._up, self._down])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the layer: [num_tokens, size] to [num_tokens, size]."""
        return self._down(self._up(x, self._activation))
