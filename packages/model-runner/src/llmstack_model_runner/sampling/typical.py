"""Locally typical sampling (Meister et al., 2023): the tokens whose surprise is nearest to the expected one."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling import multinomial


def typical_mask(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """The smallest set of mass >= typical_p, by how typical the surprise is, ties by id: bool, like `weights`.

    The surprise of a token is minus the logarithm of its probability, the expected one the distribution's entropy.

    Args:
        weights: Probabilities up to a factor of each row; 0 is never typical. float32 [num_rows, vocab_size]
        typical_p: 1 or more keeps everything. float64 [num_rows]
    """
    probabilities = weights / multinomial.total_mass(weights)[:, None].float()
    surprise = -probabilities.log()
    # Where the weight is 0 the product is NaN, and its limit is 0.
    entropy = multinomial.total_mass((probabilities * surprise).nan_to_num_(nan=0.0))
    order = (surprise - entropy[:, None].float()).abs_().sort(dim=-1, stable=True).indices
    cumulative = probabilities.gather(-1, order).cumsum(dim=-1, dtype=torch.float64)
    target = (typical_p * cumulative[:, -1])[:, None]
    num_kept = torch.searchsorted(cumulative, target).clamp_(max=weights.shape[-1] - 1) + 1
    is_kept = torch.arange(weights.shape[-1], device=weights.device) < num_kept
    mask = torch.empty_like(is_kept).scatter_(-1, order, is_kept)
    return (mask & (weights > 0)) | (typical_p >= 1.0)[:, None]
