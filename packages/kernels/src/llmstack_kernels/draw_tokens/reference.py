"""Random draws in plain PyTorch: every row is sorted."""

from __future__ import annotations

import torch

from llmstack_kernels.draw_tokens import DrawParameters

MAX_CANDIDATES = 256
"""Sets smaller than this, and those of a top-k up to it, are inverted from the most likely token down."""

_LOWEST_EXPONENT = -87.0
"""Weights below e to this power are 0."""


def draw_tokens(logits: torch.Tensor, best: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Everything over the whole vocabulary, one stage after the other."""
    values, best = logits[parameters.rows], best[parameters.rows]
    vocab_size = values.shape[-1]
    top_k, top_p = parameters.top_k.clamp(1, vocab_size), parameters.top_p
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    ranked = _weights(ordered, best, parameters.temperature, parameters.min_p)
    cumulative = ranked.double().cumsum(dim=-1)
    total = cumulative.gather(-1, top_k[:, None] - 1)
    num_kept = (cumulative < top_p[:, None] * total).sum(dim=-1) + 1
    num_kept = torch.minimum(num_kept.where(top_p < 1.0, vocab_size), top_k)
    is_kept = torch.arange(vocab_size, device=values.device) < num_kept[:, None]
    kept = ranked.where(is_kept, 0.0)
    by_id = torch.zeros_like(kept).scatter_(-1, order, kept)
    is_ranked = top_k <= min(MAX_CANDIDATES, vocab_size - 1)
    is_ranked |= (top_k >= vocab_size) & (top_p < 1.0) & (num_kept < min(MAX_CANDIDATES, vocab_size))
    by_rank = order.gather(-1, _inverted(kept, parameters.uniforms)[:, None]).squeeze(-1)
    return torch.where(is_ranked, by_rank, _inverted(by_id, parameters.uniforms))


def _weights(values: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the most likely token's, 0 below min-p."""
    exponents = (values - best[:, None]) / temperature[:, None]
    weights = exponents.exp().where(exponents > _LOWEST_EXPONENT, 0.0)
    return weights.where(weights >= min_p[:, None], 0.0)


def _inverted(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulated weight exceeds that share of the whole, at most the one that completes it."""
    cumulative = weights.double().cumsum(dim=-1)
    mass = cumulative[:, -1:]
    found = (cumulative <= numbers[:, None] * mass).sum(dim=-1)
    last = (cumulative < mass).sum(dim=-1)
    return torch.minimum(found, last).clamp(max=weights.shape[-1] - 1)
