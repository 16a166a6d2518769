"""Test support for sampling: inputs for all backends, and exact distributions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.sample_tokens import RowParameters, SamplingState

MIXED = [
    RowParameters(),
    RowParameters(temperature=1.0, seed=1),
    RowParameters(temperature=0.7, top_k=5, seed=2),
    RowParameters(temperature=1.0, top_k=20, top_p=0.8, seed=-3),
    RowParameters(temperature=1.0, top_p=0.5, seed=4),
    RowParameters(temperature=0.8, top_p=0.97, seed=(1 << 62) + 5),
    RowParameters(temperature=1.3, min_p=0.1, seed=6),
    RowParameters(temperature=1.0, min_p=0.02, top_p=0.9, top_k=50, seed=7),
]
"""Sets that are small in any vocabulary."""

LARGE = [
    RowParameters(temperature=1.0, top_k=300, seed=1),
    RowParameters(temperature=1.5, top_k=400, top_p=0.9, seed=2),
    RowParameters(temperature=1.2, top_k=500, min_p=0.001, seed=3),
    RowParameters(temperature=2.0, top_p=0.95, seed=4),
    RowParameters(temperature=3.0, top_p=0.9999, seed=5),
    RowParameters(temperature=9.0, min_p=0.05, seed=6),
    RowParameters(temperature=9.0, min_p=0.1, top_p=0.7, seed=7),
    RowParameters(temperature=1.0, top_k=255, top_p=0.99, seed=8),
]
"""Sets larger than what is ranked, in vocabularies of more than a thousand."""


def make_state(
    parameters: Sequence[RowParameters], device: str, num_outputs: int = 0, counts: torch.Tensor | None = None
) -> SamplingState:
    """A row for each, and one more that is greedy."""
    words = [one.words() for one in (*parameters, RowParameters())]
    return SamplingState(
        torch.tensor(words, dtype=torch.int64, device=device),
        torch.full((len(words),), num_outputs, dtype=torch.int64, device=device),
        counts,
    )


def make_rows(num_rows: int, device: str) -> torch.Tensor:
    return torch.arange(num_rows, dtype=torch.int32, device=device)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def pack_bits(is_allowed: torch.Tensor) -> torch.Tensor:
    """[num_rows, vocab_size] bool as [num_rows, words] int32."""
    num_rows, vocab_size = is_allowed.shape
    padded = torch.zeros(num_rows, -(-vocab_size // 32) * 32, dtype=torch.int64)
    padded[:, :vocab_size] = is_allowed
    words = (padded.view(num_rows, -1, 32) << torch.arange(32)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def distribution(logits: torch.Tensor, parameters: RowParameters) -> torch.Tensor:
    """What one row draws from, by loops over its tokens: float64 [vocab_size]."""
    scaled = logits.double() / parameters.temperature
    weights = (scaled - scaled.max()).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    order = [token_id for token_id in order if weights[token_id] >= parameters.min_p][: parameters.top_k]
    target, mass, kept = parameters.top_p * sum(weights[token_id] for token_id in order), 0.0, []
    for token_id in order:
        kept.append(token_id)
        mass += weights[token_id]
        if mass >= target and parameters.top_p < 1.0:
            break
    found = torch.zeros(len(weights), dtype=torch.float64)
    found[kept] = torch.tensor([weights[token_id] / mass for token_id in kept], dtype=torch.float64)
    return found
