"""The gated delta net of Qwen 3.5, Qwen3-Next and OLMo Hybrid.

Its state is a matrix per head, and the last few inputs of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from llmstack_kernels.causal_convolution import causal_convolution
from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from llmstack_kernels.rms_norm import gated_rms_norm
from llmstack_model_runner.layers.attention_metadata import LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.mixer import Mixer, StateTensor, number_slot, states_of_rows, tap_slot
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.sharding import sharding, spread
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots

Joins = Literal["none", "gates", "all"]


@dataclass(frozen=True, slots=True)
class DeltaNetSettings:
    """Sizes of a delta net.

    Attributes:
        num_key_heads: Heads of queries and keys; each serves as many value heads as any other.
        num_heads: Value heads, each of which has a matrix.
        length: Inputs that the convolution takes, the token's own included; at least 2.
        joins: What the checkpoint joins for each key head: all projections, as that of Qwen3-Next does, or only the
            gates, as its GGUF files do.
        is_split: It has a projection each for queries, keys and values, as that of OLMo Hybrid.
        is_tiled: Value heads go through the key heads in turns, as in GGUF files.
        rate_scale: Factor of the rates at which the matrices learn.
        norm_eps: That of the norm of answers; None for that of other norms.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    length: int
    joins: Joins = "none"
    is_tiled: bool = False
    is_split: bool = False
    rate_scale: float = 1.0
    norm_eps: float | None = None

    def check(self) -> DeltaNetSettings:
        """The settings; ValueError if they make no net."""
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"config.json: {self.num_heads} linear value heads cannot share {self.num_key_heads} key heads."
            )
        if self.length < 2:
            raise ValueError(f"config.json: linear_conv_kernel_dim must be at least 2, got {self.length}.")
        return self

    def of_rank(self) -> DeltaNetSettings:
        """The heads that this context's rank has; ValueError if they cannot be shared out."""
        heads, key_heads = self.heads()
        return replace(self, num_key_heads=len(key_heads), num_heads=len(heads), joins="none")

    def heads(self) -> tuple[range, range]:
        """Value heads and key heads of this context's rank; ValueError if they cannot be shared out."""
        if not self.is_tiled:
            return sharding().heads(self.num_heads, self.num_key_heads)
        size = sharding().size
        if self.num_heads % (size * self.num_key_heads):
            raise ValueError(
                f"tensor_parallel_size is {size}, and a rank would not have all {self.num_key_heads} key heads"
            )
        return sharding().share(self.num_heads), range(self.num_key_heads)

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs before the next token and the matrices, of this rank's heads."""
        own = self.of_rank()
        tail, matrices = (own.length - 1, own.num_channels), (own.num_heads, own.key_dim, own.value_dim)
        return (
            StateTensor("last_inputs", tail, str(dtype).removeprefix("torch.")),
            StateTensor("delta_matrices", matrices, "float32"),
        )

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> DeltaNet:
        """The net without weights."""
        return DeltaNet(f"{prefix}linear_attn.", size, self, eps, dtype, device)

    @property
    def channels(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, of its keys and of its values."""
        num_keys = self.num_key_heads * self.key_dim
        return num_keys, num_keys, self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Queries, keys and values of a token."""
        return sum(self.channels)


class DeltaNet(Mixer):
    """out(norm(gated_delta_rule(convolve(q, k, v))) * silu(z)), where q, k, v, z and two gates are projections.

    Among several ranks each has some of the value heads, with their key heads.
    """

    def __init__(
        self,
        prefix: str,
        size: int,
        settings: DeltaNetSettings,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the layer's tensors, such as `model.layers.0.linear_attn.`."""
        self._prefix, self._settings, self._own = prefix, settings, settings.of_rank()
        self._heads, key_heads = settings.heads()
        self._keys, self._values = spread(key_heads, settings.key_dim), spread(self._heads, settings.value_dim)
        num_keys = settings.num_key_heads * settings.key_dim
        self._channels = _runs((0, self._keys), (num_keys, self._keys), (2 * num_keys, self._values))
        self._in = self._make_projections(size, dtype, device)
        self._taps = torch.zeros(settings.length, self._own.num_channels, device=device)
        self._log_decay, self._decay_bias = (torch.zeros(self._own.num_heads, device=device) for _ in range(2))
        norm, out_name = ("o_norm", "o_proj") if settings.is_split else ("norm", "out_proj")
        own_eps = eps if settings.norm_eps is None else settings.norm_eps
        self._norm = RMSNorm(f"{prefix}{norm}", settings.value_dim, own_eps, dtype=dtype, device=device)
        num_values = settings.num_heads * settings.value_dim
        out = {f"{prefix}{out_name}": size}
        self._out = Linear(num_values, out, has_bias=False, dtype=dtype, device=device, inputs=self._values)

    def _make_projections(self, size: int, dtype: torch.dtype, device: torch.device) -> list[Linear]:
        """All inputs as one product or two, whose outputs are those of the convolution, then z and both gates."""
        whole, values, heads = self._settings, [self._values], [self._heads]
        num_values = whole.num_heads * whole.value_dim
        parts: list[dict[str, tuple[int, list[range]]]]  # names to sizes and to this rank's outputs
        orders: dict[str, torch.Tensor] = {}
        gates = dict.fromkeys(("b_proj", "a_proj"), (whole.num_heads, heads))
        if whole.is_split:
            owns = zip("qkv", whole.channels, (self._keys, self._keys, self._values), strict=True)
            parts = [{f"{letter}_proj": (count, [own]) for letter, count, own in owns}, gates]
            parts[0]["g_proj"] = num_values, values
        else:
            parts = [{"in_proj_qkv": (whole.num_channels, self._channels), "in_proj_z": (num_values, values)}]
            if whole.joins == "all":
                outputs = [*self._channels, *_runs((whole.num_channels, self._values))]
                parts = [{"in_proj_qkvz": (whole.num_channels + num_values, outputs)}]
            if whole.joins == "none":
                parts[0] |= {f"in_proj_{name[0]}": gate for name, gate in gates.items()}
            else:
                both = _runs((0, self._heads), (whole.num_heads, self._heads))
                parts[0]["in_proj_ba"] = 2 * whole.num_heads, both
                orders = dict(zip(("in_proj_qkvz", "in_proj_ba"), _orders(whole), strict=True))
        return [
            Linear(
                size,
                {f"{self._prefix}{name}": count for name, (count, _) in own.items()},
                has_bias=False,
                dtype=dtype,
                device=device,
                part_to_row_order={f"{self._prefix}{name}": orders[name] for name in own if name in orders},
                part_to_outputs={f"{self._prefix}{name}": outputs for name, (_, outputs) in own.items()},
            )
            for own in parts
        ]

    def _project(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Inputs of the convolution, z, and gates of rates and decays."""
        own = self._own
        sizes = [own.num_channels, own.num_heads * own.value_dim, own.num_heads, own.num_heads]
        if len(self._in) == 1:
            return [*self._in[0](x).split(sizes, -1)]
        return [*self._in[0](x).split(sizes[:2], -1), *self._in[1](x).split(sizes[2:], -1)]

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections, the convolution, the decays and the norm."""
        whole, prefix = self._settings, self._prefix
        slots = tap_slot(f"{prefix}conv1d.weight", self._taps, whole.num_channels, self._channels)
        for name, target in (("A_log", self._log_decay), ("dt_bias", self._decay_bias)):
            slots |= number_slot(f"{prefix}{name}", target, whole.num_heads, [self._heads])
        return slots | collect_slots([*self._in, self._norm, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,  # kv_cache: [num_blocks, length - 1, channels], and [num_blocks, heads, key_dim, value_dim]
    ) -> torch.Tensor:  # [num_tokens, size]
        """Reads and writes the states of the rows."""
        rows, (tails, matrices), own = states_of_rows(step.metadata), step.kv_cache, self._own
        num_values, heads = own.num_heads * own.value_dim, (len(x), own.num_heads, own.value_dim)
        mixed, gate, rates, decays = self._project(x)
        mixed = causal_convolution(mixed, self._taps, None, tails, rows, "silu")
        inputs = DeltaRuleInputs(
            mixed, decays, rates, self._log_decay, self._decay_bias, own.num_key_heads, own.is_tiled, own.rate_scale
        )
        answers = gated_delta_rule(inputs, matrices, rows)
        normed = gated_rms_norm(answers.view(heads), gate.view(heads), self._norm.weight, self._norm.eps)
        return self._out(normed.view(len(x), num_values))


def _runs(*shifted: tuple[int, range]) -> list[range]:
    """Runs that begin so much later."""
    return [range(own.start + shift, own.stop + shift) for shift, own in shifted]


def _orders(settings: DeltaNetSettings) -> Iterable[torch.Tensor]:
    """The checkpoint's row for each output: queries, keys, values and z; and the gates of updates and of decays."""
    count, group = settings.num_key_heads, settings.num_heads // settings.num_key_heads
    num_values = group * settings.value_dim
    for sizes in ([settings.key_dim, settings.key_dim, num_values, num_values], [group, group]):
        rows = torch.arange(count * sum(sizes)).view(count, sum(sizes))
        yield torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
