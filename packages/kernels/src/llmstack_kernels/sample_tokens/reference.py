"""Sampling in plain PyTorch: sorts every row, reads nothing back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.draw_tokens import DrawParameters
from llmstack_kernels.draw_tokens.reference import draw_tokens
from llmstack_kernels.sample_tokens import state as places
from llmstack_kernels.sample_tokens.state import SamplingState


@dataclass(frozen=True, slots=True)
class _Rows:
    """Words of the chosen rows by name; all [num_rows] but `endings`, [num_rows, MAX_ENDING_TOKENS]."""

    words: torch.Tensor
    num_outputs: torch.Tensor

    def floats(self, place: int) -> torch.Tensor:
        return self.words.view(torch.float64)[:, place]

    def integers(self, place: int) -> torch.Tensor:
        return self.words[:, place]


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    bitmask: torch.Tensor | None,
    has_random: bool,
    has_penalties: bool,
    is_counting: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything over the whole vocabulary, one stage after the other."""
    index = rows.long()
    known = _Rows(state.parameters[index], state.num_outputs[index])
    counts = state.token_counts[index] if has_penalties and state.token_counts is not None else None
    values = _processed(logits, known, counts, bitmask)
    best = values.amax(dim=-1)
    is_good = best.isfinite()
    token_ids = _first_equal(values, best)
    if has_random:
        is_random = known.floats(places.TEMPERATURE) > 0
        token_ids = torch.where(is_random, _draw(values, best, known), token_ids)
    token_ids = torch.where(is_good, token_ids, 0)
    if is_counting:
        state.num_outputs.index_copy_(0, index, known.num_outputs + 1)
        if counts is not None and state.token_counts is not None:
            counts = counts.scatter_add(-1, token_ids[:, None], 2 * _is_penalised(known).int())
            state.token_counts.index_copy_(0, index, counts)
    return token_ids, is_good


def uniforms(seeds: torch.Tensor, output_indices: torch.Tensor) -> torch.Tensor:
    """SplitMix64 over a counter that starts where the mixed seed says: float64 in [0, 1), 53 random bits."""
    golden = _signed(0x9E3779B97F4A7C15)
    counters = _mix(seeds + golden) + (output_indices + 1) * golden
    return _shifted(_mix(counters), 11).double() * 2.0**-53


def _mix(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shifted(values, 27)) * _signed(0x94D049BB133111EB)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, places: int) -> torch.Tensor:
    """Shifts to the right, with zeros from the left."""
    return (values >> places) & ((1 << (64 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _processed(
    logits: torch.Tensor, known: _Rows, counts: torch.Tensor | None, bitmask: torch.Tensor | None
) -> torch.Tensor:
    """Logits that only temperature and the sets are still to be applied to; infinity where there is no number."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    values = logits.float()
    if bitmask is not None:
        is_allowed = (bitmask[:, columns // 32] >> (columns % 32).int()) & 1
        values = values.masked_fill(is_allowed == 0, -torch.inf)
    values = values.masked_fill(_is_early_ending(columns, known), -torch.inf)
    if counts is not None:
        values = _penalised(values, known, counts)
    return values.masked_fill(logits.isnan(), torch.inf)


def _is_early_ending(columns: torch.Tensor, known: _Rows) -> torch.Tensor:
    is_masked = torch.zeros((len(known.words), len(columns)), dtype=torch.bool, device=columns.device)
    for place in range(places.MAX_ENDING_TOKENS):
        is_ending = columns == known.integers(places.ENDINGS + place)[:, None]
        is_masked |= is_ending & (place < known.integers(places.NUM_ENDINGS))[:, None]
    return is_masked & (known.num_outputs < known.integers(places.MIN_TOKENS))[:, None]


def _penalised(values: torch.Tensor, known: _Rows, counts: torch.Tensor) -> torch.Tensor:
    repetition, frequency, presence = (
        known.floats(place).float()[:, None] for place in (places.REPETITION, places.FREQUENCY, places.PRESENCE)
    )
    num_generated = (counts >> 1).float()
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    changed = scaled - (frequency * num_generated + presence * (num_generated > 0))
    return torch.where(_is_penalised(known) & (counts != 0), changed, values)


def _is_penalised(known: _Rows) -> torch.Tensor:
    """Whether a row has any penalty: [num_rows, 1]."""
    sizes = known.words.view(torch.float64)[:, places.REPETITION : places.PRESENCE + 1]
    return (sizes[:, :1] != 1) | (sizes[:, 1:] != 0).any(dim=-1, keepdim=True)


def _first_equal(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(values.shape[-1], device=values.device)
    return torch.where(values == best[:, None], columns, values.shape[-1] - 1).amin(dim=-1)


def _draw(values: torch.Tensor, best: torch.Tensor, known: _Rows) -> torch.Tensor:
    """Tokens of rows with a temperature; those of others mean nothing."""
    parameters = DrawParameters(
        rows=torch.arange(len(values), device=values.device),
        temperature=known.floats(places.TEMPERATURE).float(),
        min_p=known.floats(places.MIN_P).float(),
        top_k=known.integers(places.TOP_K),
        top_p=known.floats(places.TOP_P),
        uniforms=uniforms(known.integers(places.SEED), known.num_outputs),
    )
    return draw_tokens(values, best, parameters)
