"""Rotary position embedding (RoPE) and its extensions to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Parameters of RoPE.

    Attributes:
        max_positions: Longest context that is served. If it exceeds the original context, `longrope` uses its long
            factors.
        kind: `default`, `linear`, `llama3`, `yarn` or `longrope`.
        values: Numbers of the kind by their names in the configuration.
        short_factors, long_factors: Divisors of the frequency of each pair of dimensions, for `longrope`.
    """

    theta: float
    rotary_dim: int
    max_positions: int
    kind: str = "default"
    values: Mapping[str, float] = field(default_factory=dict)
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


class UnsupportedVariantError(ValueError):
    """A variant of a model that llmstack's code does not have; the message is one sentence that names the field."""


class RotaryEmbedding:
    """Table of cosines and sines for RoPE, which layers of equal parameters share.

    It is computed for the positions that the KV cache holds, or when it is first read: models may have millions of
    positions.
    """

    def __init__(self, parameters: RopeParameters, device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._cos_sin_cache: torch.Tensor | None = None
        self._of_step: torch.Tensor | None = None

    def limit_positions(self, max_positions: int) -> None:
        """Sets the longest context that is served."""
        self._parameters = replace(self._parameters, max_positions=max_positions)
        self._cos_sin_cache = None

    def hold_positions(self, num_positions: int) -> None:
        """Computes the table for so many positions, or all of the longest context, unless it has them."""
        num_rows = min(num_positions, self._parameters.max_positions)
        if self._cos_sin_cache is None or self._cos_sin_cache.shape[0] < num_rows:
            self._cos_sin_cache = self._compute(num_rows)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self._parameters.rotary_dim

    @contextmanager
    def table_of_step(self, table: torch.Tensor) -> Iterator[None]:
        """Within the block, positions are rows of this table: for tokens whose pairs turn by different positions."""
        self._of_step = table
        try:
            yield
        finally:
            self._of_step = None

    @property
    def table(self) -> torch.Tensor:
        """Cosines and sines, float32 [num_positions, rotary_dim]; of the longest context if none were asked for."""
        if self._of_step is not None:
            return self._of_step
        if self._cos_sin_cache is None:
            self._cos_sin_cache = self._compute(self._parameters.max_positions)
        return self._cos_sin_cache

    def _compute(self, num_rows: int) -> torch.Tensor:
        return _cos_sin_table(self._parameters, num_rows).to(self._device)


def _cos_sin_table(parameters: RopeParameters, num_rows: int) -> torch.Tensor:  # [num_rows, rotary_dim]
    """Rows are computed in chunks, whose temporary tensors are small."""
    frequencies, scale = rope_frequencies(parameters)
    table = torch.empty((num_rows, parameters.rotary_dim))
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        positions = torch.arange(start, min(start + _ROWS_AT_ONCE, num_rows), dtype=torch.float32)
        angles = torch.outer(positions, frequencies)  # [rows, rotary_dim / 2]
        torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1, out=table[start : start + len(positions)])
    return table


def rotary_order(rotary_dim: int, *, is_interleaved: bool) -> torch.Tensor:  # [rotary_dim]
    """The checkpoint's place of each rotated number: the kernels rotate the halves of a head."""
    places = torch.arange(rotary_dim)
    return torch.cat((places[::2], places[1::2])) if is_interleaved else places


def parse_rope(
    config: Mapping[str, Any], head_dim: int, max_positions: int, *, is_partial: bool = False
) -> RopeParameters:
    """The rotary embedding of a configuration: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    `is_partial`: Whether the family reads `partial_rotary_factor`. The classes of transformers for Llama, Mistral,
    Mixtral, Qwen, Gemma, Falcon and gpt-oss ignore it.

    Raises:
        ValueError: The kind is not supported. `dynamic` is not, since its angles depend on a request's length.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ValueError("config.json: the rotary embedding's parameters must be an object.")
    kind = str(found.get("rope_type", found.get("type", "default")))
    if kind in ("su", "yarn") and "short_factor" in found:
        kind = "longrope"  # the name in the first Phi-3 checkpoints
    if kind not in KINDS:
        raise UnsupportedVariantError(
            f"config.json: rotary embedding of type {kind[:64]!r} is not supported; {', '.join(KINDS)} are."
        )
    theta, share = (
        _positive(name, next((given[name] for given in (found, config) if given.get(name) is not None), default))
        for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0))
    )
    if not is_partial or kind == "proportional":  # where all dimensions have an angle, most of them 0
        if kind not in ("default", "proportional") and share != 1:  # transformers cannot compute it either
            raise ValueError(
                f"config.json: partial_rotary_factor {share} with a rotary embedding of type {kind} is not supported "
                "for this architecture."
            )
        share = 1.0
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ValueError(
            f"config.json: the rotary embedding has {rotary_dim} of a head's {head_dim} dimensions, and must have an "
            "even number of them."
        )
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    for name in numbers.keys() & _POSITIVE:
        _positive(name, numbers[name])
    missing = [name for name in KINDS[kind] if name not in numbers]
    if missing:
        raise ValueError(f"config.json: rotary embedding of type {kind} lacks {', '.join(missing)}.")
    if kind in ("yarn", "longrope"):
        original = float(config.get("original_max_position_embeddings") or max_positions)
        original = numbers.setdefault("original_max_position_embeddings", original)
        numbers.setdefault("factor", max_positions / original)
    names = ("short_factor", "long_factor") if kind == "longrope" else ()
    factors = [_read_factors(found, name, rotary_dim // 2) for name in names]
    parameters = RopeParameters(theta, rotary_dim, max_positions, kind, numbers, *factors)
    _check_frequencies(parameters)
    return parameters


def _check_frequencies(parameters: RopeParameters) -> None:
    try:
        frequencies, scale = rope_frequencies(parameters)
        is_finite = math.isfinite(scale) and bool(frequencies.isfinite().all())
    except (ArithmeticError, ValueError):  # a logarithm of what is not positive, or a division by zero
        is_finite = False
    if not is_finite:
        raise ValueError(f"config.json: the numbers of the {parameters.kind} rotary embedding give no finite angles.")


def _positive(name: str, value: object) -> float:
    if isinstance(value, int | float) and 0 < value < math.inf:
        return float(value)
    raise ValueError(f"config.json: the rotary embedding's {name} must be a positive number, got {str(value)[:64]}.")


_POSITIVE = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": (),
    "proportional": (),
}
"""Kind to the names of its required numbers."""


def _read_factors(found: Mapping[str, Any], name: str, num_pairs: int) -> tuple[float, ...]:
    values = found.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int | float) and value > 0 for value in values):
        raise ValueError(f"config.json: the rotary embedding's {name} must be a list of positive numbers.")
    if len(values) != num_pairs:
        raise ValueError(
            f"config.json: the rotary embedding's {name} must have {num_pairs} numbers, has {len(values)}."
        )
    return tuple(float(value) for value in values)


def rope_frequencies(parameters: RopeParameters) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, float32 [rotary_dim / 2], and a factor of cosines and sines."""
    exponents = torch.arange(0, parameters.rotary_dim, 2, dtype=torch.int64).float() / parameters.rotary_dim
    frequencies = 1.0 / (parameters.theta**exponents)
    if parameters.kind == "proportional":
        return _proportional(frequencies, parameters.values), 1.0
    if parameters.kind == "linear":
        return frequencies / parameters.values["factor"], 1.0
    if parameters.kind == "llama3":
        return _llama3(frequencies, parameters.values), 1.0
    if parameters.kind == "yarn":
        return _yarn(frequencies, parameters)
    if parameters.kind == "longrope":
        return _longrope(frequencies, parameters)
    return frequencies, 1.0


def _proportional(frequencies: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    """Gemma 4's: the first pairs of dimensions turn as those of a whole head would, the others do not."""
    num_turning = int(values.get("partial_rotary_factor", 1.0) * len(frequencies))
    is_turning = torch.arange(len(frequencies)) < num_turning
    return torch.where(is_turning, frequencies, 0.0) / values.get("factor", 1.0)


def _longrope(frequencies: torch.Tensor, parameters: RopeParameters) -> tuple[torch.Tensor, float]:
    """Frequencies with a divisor each (arXiv 2402.13753).

    Short or long factors are chosen once, by the longest context that is served, and not by each request's length.
    Requests share cached keys, and keys in the cache cannot be rotated again when a request grows past the limit.
    """
    values = parameters.values
    original, factor = values["original_max_position_embeddings"], values["factor"]
    is_long = parameters.max_positions > original
    factors = torch.tensor(parameters.long_factors if is_long else parameters.short_factors)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / factors, values.get("attention_factor", default)


def _llama3(frequencies: torch.Tensor, values: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1's scaling: low frequencies are divided by the factor, high ones kept, those between blended."""
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

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))

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
