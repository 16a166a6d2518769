"""What the scheduler tells the model runner to compute in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from llmstack_types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner has no row for: new, or resumed after a preemption.

    Attributes:
        token_ids: All known tokens, prompt then output; the runner owns the list from here on.
        num_prompt_tokens: How many of them are the prompt.
        sampling_params: `seed` is set; counts of penalties and of `min_tokens` start at `num_prompt_tokens`.
        eos_token_ids: Masked by the sampler until `min_tokens` is reached, as are `stop_token_ids`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    lora_name: str | None = None


class ScheduledRequest(NamedTuple):
    """One row of a step; a named tuple, since every running request makes one per step.

    The row computes tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of the request. It samples
    one token if that reaches the last known token, none otherwise (a chunk of a prefill).

    Attributes:
        num_computed_tokens: Tokens whose KV exists before this step.
        num_scheduled_tokens: At least 1.
        new_block_ids: Blocks to append to the request's block table; for a new request, its whole table.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    The runner applies `removed_request_ids`, then `new_requests`, then runs `scheduled_requests`. In each layer the KV
    of every row is written before any row attends: a row may read, through its block table, blocks that another row of
    the same step fills (prefix hits within a batch).

    Attributes:
        removed_request_ids: Rows to drop: finished, aborted or preempted since the last step.
        total_num_scheduled_tokens: Sum over the rows, at most `max_num_batched_tokens`; 0 when there is nothing to run.
    """

    step: int
    new_requests: list[NewRequest] = field(default_factory=list)
    scheduled_requests: list[ScheduledRequest] = field(default_factory=list)
    removed_request_ids: list[str] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0

    def is_empty(self) -> bool:
        """True when no row has anything to compute."""
        return not self.scheduled_requests
