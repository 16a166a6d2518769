"""The distribution that the sampler draws each row from, written out."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling import multinomial
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.sampler import process_logits
from llmstack_model_runner.sampling.top_k_top_p import top_k_top_p_mask


def target_probabilities(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Probability of every token under each row's parameters: float32 [num_rows, vocab_size].

    After masks, bias, penalties, temperature and the sets, exactly those of the sampler; a greedy row has probability 1
    at its first maximum. A row of which nothing can be drawn has NaN, or means nothing.

    Args:
        logits: float32 [num_rows, vocab_size]; left as they are.
        metadata: Names rows of `logits`.
    """
    processed = process_logits(logits, metadata)
    best, token_ids = processed.max(dim=-1)
    probabilities = torch.zeros_like(logits).scatter_(-1, token_ids[:, None], 1.0)
    if metadata.random is not None:
        rows = torch.from_numpy(metadata.random.rows).to(logits.device)
        probabilities[rows] = _random_probabilities(processed[rows], best[rows, None], metadata.random)
    return probabilities


def _random_probabilities(logits: torch.Tensor, best: torch.Tensor, random: RandomRows) -> torch.Tensor:
    device = logits.device
    weights = ((logits - best) / torch.from_numpy(random.temperature).to(device)[:, None]).exp_()
    weights.masked_fill_(weights < torch.from_numpy(random.min_p).to(device)[:, None], 0.0)
    if (random.top_k < logits.shape[-1]).any() or (random.top_p < 1.0).any():
        top_k, top_p = torch.from_numpy(random.top_k).to(device), torch.from_numpy(random.top_p).to(device)
        weights *= top_k_top_p_mask(weights, top_k, top_p)
    return weights.div_(multinomial.total_mass(weights)[:, None])
