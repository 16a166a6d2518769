"""Log-probabilities of prompt tokens, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from llmstack_model_runner.sampling import LogprobsTensors, gather_logprobs
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import ModelInputs

_MAX_POSITIONS = 256
"""Number of positions with logits in memory at once; 2,048 tokens with a vocabulary of 128,000 would need 1 GB."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of one request's prompt tokens that a step has completed."""

    request_id: str
    tensors: LogprobsTensors


def compute_prompt_logprobs(
    batch: InputBatch,
    step: StepRows,
    inputs: ModelInputs,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[PromptLogprobs]:
    """Log-probabilities for all rows that report them; the state at position p - 1 gives the entry of position p.

    `compute_logits`: From places of tokens in the step to their logits.
    """
    for index, row in enumerate(step.rows.tolist()):
        num_top = batch.num_prompt_logprobs.get(row)
        if num_top is None:
            continue
        start = int(step.num_computed_tokens[index])
        end = min(start + int(step.num_scheduled_tokens[index]), int(batch.num_prompt_tokens[row]) - 1)
        if start >= end:
            continue
        targets = torch.from_numpy(batch.token_ids[row, start + 1 : end + 1]).long().to(inputs.token_ids.device)
        first = int(inputs.query_start_loc[index])
        tokens = torch.arange(first, first + end - start, device=targets.device)
        parts = [
            gather_logprobs(compute_logits(part), part_targets, [num_top] * len(part_targets))
            for part, part_targets in zip(tokens.split(_MAX_POSITIONS), targets.split(_MAX_POSITIONS), strict=True)
        ]
        yield PromptLogprobs(step.request_ids[index], LogprobsTensors.concatenate(parts))
