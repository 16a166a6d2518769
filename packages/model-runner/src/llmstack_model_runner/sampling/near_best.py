"""Top-n-sigma: the tokens whose logits are near the best one (Tang et al., 2024)."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling import multinomial


def near_best_mask(logits: torch.Tensor, best: torch.Tensor, num_sigmas: torch.Tensor) -> torch.Tensor:
    """The logits of at least `best - num_sigmas * sigma`, as in llama.cpp: bool, like `logits`.

    Sigma is the standard deviation of the logits of a row that are finite. A division of all by a temperature changes
    nothing. Sums have the order of the vocabulary, so that a row's mask does not depend on other rows.

    Args:
        logits: Minus infinity is never near. float32 [num_rows, vocab_size]
        best: The largest one of each row. [num_rows, 1]
        num_sigmas: Above 0. float64 [num_rows]
    """
    is_finite = logits > -torch.inf
    count = is_finite.sum(dim=-1)
    offsets = (logits - best).masked_fill_(~is_finite, 0.0)  # around the best one, whose size loses no bits
    mean = multinomial.total_mass(offsets) / count
    centred = (offsets - mean[:, None].float()).masked_fill_(~is_finite, 0.0)
    sigma = (multinomial.total_mass(centred.square_()) / count).sqrt()
    return is_finite & (offsets >= -(num_sigmas * sigma)[:, None].float())
