"""Lightning attention: a matrix per head that decays at a fixed speed.

It is the recurrence of Mamba-2 with steps of 1 (arXiv 2401.04658), without a convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_kernels.state_space_scan import ScanInputs, state_space_scan
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, states_of_rows
from llmstack_model_runner.layers.norm import SharedRMSNorm
from llmstack_model_runner.layers.sharding import sharding, spread
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots

_NORM_EPS = 1e-6  # whatever the configuration says of other norms


@dataclass(frozen=True, slots=True)
class LightningSettings:
    """Sizes of a layer.

    Attributes:
        depth: Number of the layer over that of the last one, from 0 to 1; deeper layers forget more slowly.
    """

    num_heads: int
    head_dim: int
    depth: float

    @property
    def heads(self) -> range:
        """The heads of this context's rank; ValueError if they cannot be shared out."""
        return sharding().heads(self.num_heads, self.num_heads)[0]

    def log_speeds(self) -> torch.Tensor:
        """Logarithms of all heads' speeds of decay: [num_heads] float32."""
        base = 2.0 ** (-8 / self.num_heads)
        return torch.tensor([(n + 1) * math.log(base) + math.log(1 - self.depth + 1e-5) for n in range(self.num_heads)])

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The matrices of this rank's heads."""
        return (StateTensor("lightning_matrices", (len(self.heads), self.head_dim, self.head_dim), "float32"),)

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> LightningAttention:
        """The layer without weights."""
        return LightningAttention(f"{prefix}self_attn.", size, self, dtype, device)


class LightningAttention(Mixer):
    """out(norm(q S) * sigmoid(gate)), where S takes in k v of each token. Among several ranks each has some heads."""

    def __init__(
        self, prefix: str, size: int, settings: LightningSettings, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.self_attn.`."""
        self._settings, self._heads = settings, settings.heads
        total, own = settings.num_heads * settings.head_dim, spread(self._heads, settings.head_dim)
        name = f"{prefix}qkv_proj"
        self._in = Linear(
            size,
            {name: 3 * total},
            has_bias=False,
            dtype=dtype,
            device=device,
            part_to_row_order={name: _scan_order(settings)},
            part_to_outputs={name: [range(own.start + n * total, own.stop + n * total) for n in range(3)]},
        )
        gate = f"{prefix}output_gate"
        self._gate = Linear(
            size, {gate: total}, has_bias=False, dtype=dtype, device=device, part_to_outputs={gate: [own]}
        )
        out = {f"{prefix}out_proj": size}
        self._out = Linear(total, out, has_bias=False, dtype=dtype, device=device, inputs=own)
        self._norm = SharedRMSNorm(f"{prefix}norm", total, own, _NORM_EPS, dtype=dtype, device=device)
        self._log_speeds = settings.log_speeds()[self._heads.start : self._heads.stop].to(device)
        self._zeros = torch.zeros(len(self._heads), device=device)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections and the norm."""
        return collect_slots([self._in, self._gate, self._norm, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: [num_blocks, heads, head_dim, head_dim]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        (matrices,), count = step.kv_cache, len(self._heads)
        mixed = torch.nn.functional.silu(self._in(x))
        inputs = ScanInputs(
            mixed, mixed.new_zeros(len(x), count), self._log_speeds, self._zeros, self._zeros, count, (1.0, 1.0)
        )
        answers = state_space_scan(inputs, matrices, states_of_rows(step.metadata))
        return self._out(sigmoid_gate(self._norm(answers), self._gate(x)))


def _scan_order(settings: LightningSettings) -> torch.Tensor:
    """The checkpoint's row of each output: values of all heads, then keys, then queries, as the scan takes them."""
    rows = torch.arange(3 * settings.num_heads * settings.head_dim).view(settings.num_heads, 3, settings.head_dim)
    return rows[:, [2, 1, 0]].transpose(0, 1).flatten()
