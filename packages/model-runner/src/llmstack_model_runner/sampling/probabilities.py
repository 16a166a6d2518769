"""The distribution that the sampler draws each row from, written out."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling.draws import probabilities
from llmstack_model_runner.sampling.metadata import SamplingMetadata
from llmstack_model_runner.sampling.processing import process_logits


def target_probabilities(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Probability of every token under each row's parameters: float32 [num_rows, vocab_size].

    After masks, bias, penalties, temperature and the sets, exactly those of the sampler; a greedy row has probability 1
    at its first maximum. A row of which nothing can be drawn has NaN, or means nothing.

    Args:
        logits: float32 [num_rows, vocab_size]; left as they are.
        metadata: Names rows of `logits`.
    """
    processed = process_logits(logits.clone() if metadata.has_changes else logits, metadata)
    result = torch.zeros_like(logits).scatter_(-1, processed.token_ids[:, None], 1.0)
    if processed.random is not None:
        rows = torch.from_numpy(processed.random.rows).to(logits.device)
        result[rows] = probabilities(processed.logits, processed.best, processed.random)
    return result
