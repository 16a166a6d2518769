"""A step in the making: the rows chosen so far and what is left of the token budget."""

from __future__ import annotations

from llmstack_core_scheduler.request import Request
from llmstack_types import NewRequest, ScheduledRequest, SchedulerOutput


class StepPlan:
    """The rows of one step, collected row by row.

    Attributes:
        budget: Tokens that the step can still take.
        requests: The requests of `rows`, in the same order.
        preempted_request_ids: Rows that the runner has to drop because their blocks went to others.
    """

    __slots__ = ("_max_num_tokens", "budget", "new_requests", "preempted_request_ids", "requests", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._max_num_tokens = budget
        self.rows: list[ScheduledRequest] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self.preempted_request_ids: list[str] = []

    def add(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Adds a row of the request's next `num_tokens` tokens; from now on they count as computed."""
        num_computed_tokens = request.num_computed_tokens
        self.rows.append(ScheduledRequest(request.request_id, num_computed_tokens, num_tokens, new_block_ids))
        self.requests.append(request)
        request.num_computed_tokens = num_computed_tokens + num_tokens
        self.budget -= num_tokens

    def introduce(self, request: Request) -> None:
        """Tells the runner all about a request it has no row for."""
        arrival = request.arrival
        self.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=arrival.sampling_params,
                eos_token_ids=arrival.eos_token_ids,
                lora_name=arrival.lora_name,
            )
        )

    def finish(self, step: int, removed_request_ids: list[str]) -> SchedulerOutput:
        """The step as the runner gets it; `removed_request_ids` are the rows that ended since the last one."""
        return SchedulerOutput(
            step=step,
            new_requests=self.new_requests,
            scheduled_requests=self.rows,
            removed_request_ids=removed_request_ids + self.preempted_request_ids,
            total_num_scheduled_tokens=self._max_num_tokens - self.budget,
        )
