"""Rotary position embedding and the ways checkpoints stretch it to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from llmstack_kernels.rotary_embedding import rotary_embedding


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How angles grow with the position.

    Attributes:
        kind: `default`, `linear`, `llama3` or `yarn`.
        values: The numbers of the kind, as the configuration names them.
    """

    theta: float
    rotary_dim: int
    max_positions: int
    kind: str = "default"
    values: Mapping[str, float] = field(default_factory=dict)


class RotaryEmbedding:
    """Turns queries and keys by angles that grow with the position; one table serves all layers."""

    def __init__(self, parameters: RopeParameters, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(parameters)
        positions = torch.arange(parameters.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)  # [max_positions, rotary_dim / 2]
        self._cos_sin_cache = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)

    def __call__(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key [num_tokens, heads, head_dim], turned."""
        return rotary_embedding(positions, query, key, self._cos_sin_cache)


def parse_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeParameters:
    """The rotary embedding of a configuration: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: A kind that is not supported; `dynamic` is not, since its angles depend on the request's length.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ValueError("config.json: the rotary embedding's parameters must be an object.")
    kind = str(found.get("rope_type", found.get("type", "default")))
    if kind not in _KINDS:
        raise ValueError(
            f"config.json: rotary embedding of type {kind[:64]!r} is not supported; {', '.join(_KINDS)} are."
        )
    theta = float(found.get("rope_theta", config.get("rope_theta", 10000.0)))
    share = float(found.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    missing = [name for name in _KINDS[kind] if name not in numbers]
    if missing:
        raise ValueError(f"config.json: rotary embedding of type {kind} lacks {', '.join(missing)}.")
    return RopeParameters(theta, int(head_dim * share), max_positions, kind, numbers)


# Kind to the numbers it cannot do without.
_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


def rope_frequencies(parameters: RopeParameters) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, float32 [rotary_dim / 2]; and a factor for cosines and sines."""
    exponents = torch.arange(0, parameters.rotary_dim, 2, dtype=torch.int64).float() / parameters.rotary_dim
    frequencies = 1.0 / (parameters.theta**exponents)
    if parameters.kind == "linear":
        return frequencies / parameters.values["factor"], 1.0
    if parameters.kind == "llama3":
        return _llama3(frequencies, parameters.values), 1.0
    if parameters.kind == "yarn":
        return _yarn(frequencies, parameters)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    """Low frequencies are divided by the factor, high ones stay, those between are blended (Llama 3.1)."""
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    turns = values["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    share = (turns - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    return torch.where(turns < low, frequencies / factor, torch.where(turns > high, frequencies, blended))


def _yarn(frequencies: torch.Tensor, parameters: RopeParameters) -> tuple[torch.Tensor, float]:
    """NTK-by-parts interpolation and the attention factor of YaRN (arXiv 2309.00071, sections 3.2 to 3.4)."""
    values = parameters.values
    factor = values["factor"]
    original = values.get("original_max_position_embeddings", float(parameters.max_positions))
    dim = parameters.rotary_dim

    def dimension_of(num_turns: float) -> float:
        return dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = dimension_of(values.get("beta_fast", 32.0)), dimension_of(values.get("beta_slow", 1.0))
    if values.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_attention_factor(factor, values)


def _yarn_attention_factor(factor: float, values: Mapping[str, float]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in values:
        return values["attention_factor"]
    if values.get("mscale") and values.get("mscale_all_dim"):
        return magnitude(values["mscale"]) / magnitude(values["mscale_all_dim"])
    return magnitude(1.0)
