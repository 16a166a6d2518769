"""The plan of one step: the rows chosen so far and the remaining token budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.request import Request
from llmstack_types import EncoderWork, ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput

# Calling the class, a function of Python around this, takes half as long again.
_make_row = tuple.__new__


class StepUnderWay(NamedTuple):
    """A step that was issued and is not updated yet."""

    requests: list[Request]
    start_s: float
    num_left_tokens: int


def is_under_way(request_id: str, steps: Iterable[StepUnderWay]) -> bool:
    """Whether one of the steps has a row of the request, or had one."""
    return any(request.request_id == request_id for step in steps for request in step.requests)


def check_results(rows: Sequence[ScheduledRequest], output: ModelRunnerOutput) -> None:
    """Checks that results are those of the rows of a step.

    Raises:
        ValueError: They are not parallel to them.
    """
    if len(output.sampled_token_ids) != len(rows):
        raise ValueError(f"sampled_token_ids has {len(output.sampled_token_ids)} entries for {len(rows)} rows")
    if output.request_ids != [row.request_id for row in rows]:
        raise ValueError("request_ids must be those of the rows, in their order")


def count_left_tokens(requests: Iterable[Request]) -> int:
    """Counts the known tokens of requests that are not computed yet."""
    return sum(request.num_tokens - request.num_computed_tokens for request in requests)


NO_WORK: Final[list[EncoderWork]] = []
NO_NUMBERS: Final[list[int]] = []
NO_LONG_PROMPTS: Final[list[tuple[Request, int]]] = []
"""What a plan has until others make lists of their own: making them costs every step of short texts."""


class StepPlan:
    """The rows of one step, collected row by row.

    Attributes:
        budget: Tokens that the step can still take.
        requests: The requests of `rows`, in the same order.
        preempted_request_ids: Rows that the runner has to drop because their blocks went to others.
        has_preempted: Whether a request has lost blocks in this step.
        max_num_rows: Rows of requests that ran before: each stage of the model has its share of them.
        num_unknown_tokens: Tokens of a row that the step before this one may still be sampling.
        num_partial_rows: Rows that leave some of their request's tokens for later.
        num_left_tokens: Those tokens.
        long_prompts: Those that let shorter ones go first, each with the tokens of it that the step may have.
        num_first_tokens: With at most so many tokens left, a waiting request goes before these.
        num_reserved_tokens: Tokens of these, beside one of each, that take no room from shorter ones.
        num_forks: Requests that begin in this step with another's blocks.
        swap_outs: Copies (block, host block) that come first.
        swap_ins: Copies (host block, block) that come next.
        block_copies: Copies (source, destination) that come last.
        states: State blocks (read, written) of each row; empty for a model without states.
        encoder_work: Parts of items that are encoded before the rows.
        freed_media: Numbers of items that are no longer needed.
    """

    __slots__ = (
        "_max_num_tokens",
        "_max_prefill_tokens",
        "block_copies",
        "budget",
        "encoder_work",
        "freed_media",
        "has_preempted",
        "long_prompts",
        "max_num_rows",
        "new_requests",
        "num_first_tokens",
        "num_forks",
        "num_left_tokens",
        "num_partial_rows",
        "num_reserved_tokens",
        "num_unknown_tokens",
        "preempted_request_ids",
        "requests",
        "rows",
        "states",
        "swap_ins",
        "swap_outs",
    )

    def __init__(self, config: SchedulerConfig, num_running: int, stage_tokens: int = 0) -> None:
        """`num_running`: Requests that run before the step; `stage_tokens`: as `SchedulerConfig.stage_tokens` says."""
        self.budget = self._max_num_tokens = config.step_tokens(num_running, stage_tokens)
        self._max_prefill_tokens = config.max_prefill_tokens or self._max_num_tokens
        num_stages = config.pipeline_parallel_size
        self.max_num_rows = num_running if num_stages == 1 else -(-num_running // num_stages)
        self.num_unknown_tokens = 1 if num_stages == 1 else 0
        self.rows: list[ScheduledRequest] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self.preempted_request_ids: list[str] = []
        self.has_preempted = False
        self.num_partial_rows = self.num_left_tokens = 0
        self.num_forks = self.num_reserved_tokens = self.num_first_tokens = 0
        self.long_prompts = NO_LONG_PROMPTS
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.block_copies: list[tuple[int, int]] = []
        self.states: list[tuple[int, int]] = []
        self.encoder_work, self.freed_media = NO_WORK, NO_NUMBERS

    def add(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Adds a row of the request's next `num_tokens` tokens; from now on they count as computed."""
        start = request.num_computed_tokens
        self.rows.append(_make_row(ScheduledRequest, (request.request_id, start, num_tokens, new_block_ids, ())))
        self.requests.append(request)
        request.num_computed_tokens = end = start + num_tokens
        self.budget -= num_tokens
        if end != request.num_tokens:
            self.num_partial_rows += 1
            self.num_left_tokens += request.num_tokens - end
        elif end < request.max_num_slots and self.num_unknown_tokens:
            request.num_tokens = end + 1  # the row samples, and that token will not be the last

    def leave(self, request: Request) -> None:
        """Adds no row for a request that runs: its next token waits for the encoder."""
        self.num_partial_rows += 1
        self.num_left_tokens += request.num_tokens - request.num_computed_tokens

    def has_room_for_prefill(self, num_tokens: int) -> bool:
        """Whether so many tokens of a prompt may join those of other requests; the first prompt always may.

        One token of each row does not count, so that decodes take no room.
        """
        num_others = self._max_num_tokens - self.budget - len(self.rows) - self.num_reserved_tokens
        return not num_others or num_tokens == 1 or num_others + num_tokens - 1 <= self._max_prefill_tokens

    @property
    def has_prompts(self) -> bool:
        """Whether any row has more than one token."""
        return self._max_num_tokens - self.budget > len(self.rows)

    def extend(self, index: int, num_tokens: int, new_block_ids: list[int]) -> None:
        """Extends a row by further tokens of a prompt, which do not end it."""
        row, request = self.rows[index], self.requests[index]
        self.rows[index] = row._replace(
            num_scheduled_tokens=row.num_scheduled_tokens + num_tokens,
            new_block_ids=row.new_block_ids + new_block_ids,
        )
        request.num_computed_tokens += num_tokens
        self.num_left_tokens -= num_tokens
        self.budget -= num_tokens

    def add_drafts(self, index: int, draft_token_ids: list[int], new_block_ids: list[int]) -> None:
        """Extends a row by drafts; until it is known which are right, nothing of the request is left to compute."""
        row, request = self.rows[index], self.requests[index]
        self.rows[index] = row._replace(
            num_scheduled_tokens=row.num_scheduled_tokens + len(draft_token_ids),
            new_block_ids=row.new_block_ids + new_block_ids,
            draft_token_ids=draft_token_ids,
        )
        request.num_computed_tokens += len(draft_token_ids)
        request.num_tokens = request.num_computed_tokens
        self.budget -= len(draft_token_ids)

    def num_tokens_before(self, request: Request) -> int:
        """Tokens of a request whose KV is sure to exist before this step; O(rows).

        None of a request that begins in it: what it has found may be what another row of the step computes.
        """
        for row, other in zip(self.rows, self.requests, strict=True):
            if other is request:
                is_new = any(new.request_id == request.request_id for new in self.new_requests)
                return 0 if is_new else row.num_computed_tokens
        return request.num_computed_tokens

    def introduce(self, request: Request, num_held_tokens: int = 0) -> None:
        """Tells the runner all about a request it has no row for; `num_held_tokens` as in `NewRequest`."""
        arrival = request.arrival
        self.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=arrival.sampling_params,
                eos_token_ids=arrival.eos_token_ids,
                lora_name=arrival.lora_name,
                pooling_params=arrival.pooling_params,
                num_held_tokens=num_held_tokens if num_held_tokens > request.num_computed_tokens else 0,
                media=request.media,
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
            swap_outs=self.swap_outs,
            swap_ins=self.swap_ins,
            block_copies=self.block_copies,
            states=self.states,
            encoder_work=self.encoder_work,
            freed_media=self.freed_media,
        )
