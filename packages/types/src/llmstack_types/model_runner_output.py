"""Results of one step of the model runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmstack_types.engine_core import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Results of one step; lists are parallel to `SchedulerOutput.scheduled_requests`.

    Attributes:
        request_ids: One per row.
        sampled_token_ids: Per row the tokens sampled; empty for a chunk of a prefill.
        logprobs: Request id to one entry per sampled token, for requests that asked.
        prompt_logprobs: Request id to the entries of the prompt tokens this step completed. Chunks are returned as they
            are computed, in order: the entry at prompt position p (p >= 1) comes with the chunk that computes p - 1.
        errors: Request id to what went wrong with that row alone; the others are good.
        pooled: Request id to the vector of a pooling request whose prompt this step completed: float32, little-endian.
    """

    request_ids: list[str] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    pooled: Mapping[str, bytes] = field(default_factory=dict)
