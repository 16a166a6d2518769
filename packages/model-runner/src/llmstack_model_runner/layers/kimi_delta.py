"""Kimi Delta Attention: a delta net whose matrices have a decay for each row.

Its state is a matrix per head, and the last few inputs of a convolution (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, number_slot, states_of_rows, tap_slot
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.sharding import sharding, spread
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot, collect_slots


@dataclass(frozen=True, slots=True)
class KimiDeltaSettings:
    """Sizes of a net; queries, keys and values have heads of one size.

    Attributes:
        length: Inputs that the convolution takes, the token's own included; at least 2.
        rank: Numbers that decays are made of, and as many that gates are; None where the hidden state is.
        lowest: Lower bound of the logarithm of a decay; None for none.
        has_wide_speeds: The checkpoint's speeds of decay are [1, 1, num_heads, 1].
    """

    num_heads: int
    head_dim: int
    length: int
    rank: int | None
    lowest: float | None = None
    has_wide_speeds: bool = False

    def check(self) -> KimiDeltaSettings:
        """The settings; ValueError if the convolution has no earlier input."""
        if self.length < 2:
            raise ValueError(f"config.json: the convolution must have a length of at least 2, got {self.length}.")
        return self

    @property
    def heads(self) -> range:
        """The heads of this context's rank; ValueError if they cannot be shared out."""
        return sharding().heads(self.num_heads, self.num_heads)[0]

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs before the next token and the matrices, of this rank's heads."""
        count, size = len(self.heads), self.head_dim
        return (
            StateTensor("last_inputs", (self.length - 1, 3 * count * size), str(dtype).removeprefix("torch.")),
            StateTensor("delta_matrices", (count, size, size), "float32"),
        )

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> KimiDelta:
        """The net without weights."""
        return KimiDelta(f"{prefix}self_attn.", size, self, eps, dtype, device)


class KimiDelta(Mixer):
    """out(norm(gated_delta_rule(convolve(q, k, v))) * sigmoid(gate)), where all inputs are projections.

    Among several ranks each has some of the heads.
    """

    def __init__(
        self,
        prefix: str,
        size: int,
        settings: KimiDeltaSettings,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.self_attn.`."""
        self._prefix, self._settings, self._heads = prefix, settings, settings.heads
        self._values = spread(self._heads, settings.head_dim)
        self._total = settings.num_heads * settings.head_dim

        def linear(in_features: int, names: list[str], outputs: int, own: range | None) -> Linear:
            parts = {f"{prefix}{name}": outputs for name in names}
            owns = {} if own is None else {name: [own] for name in parts}
            return Linear(in_features, parts, has_bias=False, dtype=dtype, device=device, part_to_outputs=owns)

        self._in = linear(size, ["q_proj", "k_proj", "v_proj"], self._total, self._values)
        self._rates = linear(size, ["b_proj"], settings.num_heads, self._heads)
        rank = settings.rank
        self._narrow = None if rank is None else linear(size, ["f_a_proj", "g_a_proj"], rank, None)
        names = ["f_proj", "g_proj"] if rank is None else ["f_b_proj", "g_b_proj"]
        self._decays, self._gates = (linear(rank or size, [name], self._total, self._values) for name in names)
        count = len(self._values)
        self._taps = torch.zeros(settings.length, 3 * count, device=device)
        self._speeds, self._bias = torch.zeros(len(self._heads), device=device), torch.zeros(count, device=device)
        self._norm = RMSNorm(f"{prefix}o_norm", settings.head_dim, eps, dtype=dtype, device=device)
        out = {f"{prefix}o_proj": size}
        self._out = Linear(self._total, out, has_bias=False, dtype=dtype, device=device, inputs=self._values)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections, the convolution, the decays and the norm."""
        total, prefix = self._total, self._prefix
        channels = [range(own.start + n * total, own.stop + n * total) for n in range(3) for own in (self._values,)]
        slots = tap_slot(f"{prefix}conv1d.weight", self._taps, 3 * total, channels)
        slots |= number_slot(f"{prefix}dt_bias", self._bias, total, [self._values])
        slots[f"{prefix}A_log"] = self._speed_slot()
        parts = [self._in, self._rates, self._narrow, self._decays, self._gates, self._norm, self._out]
        return slots | collect_slots(parts)

    def _speed_slot(self) -> WeightSlot:
        count, is_wide = self._settings.num_heads, self._settings.has_wide_speeds
        part = None if len(self._heads) == count else WeightPart(2 if is_wide else 0, (self._heads,))
        shape = (1, 1, count, 1) if is_wide else (count,)
        return WeightSlot(shape, partial(_copy_flat, self._speeds), WeightKind.BIAS, part=part)

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: [num_blocks, length - 1, channels], and [num_blocks, heads, head_dim, head_dim]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        rows, (tails, matrices), own = states_of_rows(step.metadata), step.kv_cache, self._settings
        mixed = causal_convolution(self._in(x), self._taps, None, tails, rows, "silu")
        forget = keep = x
        if self._narrow is not None:
            forget, keep = (part.contiguous() for part in self._narrow(x).chunk(2, -1))
        inputs = DeltaRuleInputs(
            mixed, self._decays(forget), self._rates(x), self._speeds, self._bias, len(self._heads), lowest=own.lowest
        )
        answers = gated_delta_rule(inputs, matrices, rows)
        normed = self._norm(answers.view(len(x), len(self._heads), own.head_dim)).view(len(x), -1)
        return self._out(sigmoid_gate(normed, self._gates(keep)))


def _copy_flat(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor.flatten())
