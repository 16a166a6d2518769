"""Chooses what each step computes, and takes over what the step brought."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from llmstack_core_scheduler.admission import longest_length
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.output_builder import build_error, build_output, collect_prompt_logprobs
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request, RequestStatus
from llmstack_core_scheduler.request_queue import POLICIES, RequestQueue, SchedulingPolicy
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.stop_check import append_until_stop
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
)


class Scheduler:
    """Continuous batching under one token budget: running requests first, then waiting ones, prefill and decode alike.

    A pure function of its calls: no clock, no randomness, no I/O, no order of a set. Equal calls give equal decisions.

    The request that goes first by policy always advances: blocks are taken from the one that goes last. A preempted
    request loses its blocks and its row, and later comes back as a new one with all its tokens (recompute).

    Attributes:
        running: Requests that hold blocks, by rank.
        waiting: Requests that hold none, new and preempted, by rank.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, policy: SchedulingPolicy | None = None
    ) -> None:
        """`policy` replaces the one that `config.policy` names."""
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self._config = config
        self._kv_cache_manager = kv_cache_manager
        self._block_size = kv_cache_manager.block_size
        self._policy = policy or POLICIES[config.policy]
        self._arrival_numbers = count()
        self._requests: dict[str, Request] = {}
        self._step_to_requests: dict[int, list[Request]] = {}
        self._removed_request_ids: list[str] = []
        self._step = 0
        self._num_scheduled_tokens = 0
        self._num_preemptions = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: It can never fit, or its id is in use; nothing has changed.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"The request id '{request.request_id[:64]}' is in use.",
                param="request_id",
                code="duplicate_request_id",
            )
        max_num_tokens = longest_length(request, self._config.max_model_len, self._kv_cache_manager)
        rank = self._policy.rank(request, next(self._arrival_numbers))
        queued = Request(request, rank, max_num_tokens)
        self._requests[queued.request_id] = queued
        self.waiting.add(queued)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and frees their blocks; unknown ids are ignored. No output follows.

        Between `schedule` and `update_from_output` too: the step's results for them are then dropped.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._retire(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """True while a step could bring something, or the runner has not yet been told of a removed request."""
        return bool(self._requests or self._removed_request_ids)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step. `now_s` is part of the log of calls; no decision reads it yet."""
        plan = StepPlan(self._config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted_request_ids:
            self._admit_waiting(plan)
        return self._issue(plan)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Takes over the step's results: appends tokens, ends requests, frees blocks.

        Raises:
            ValueError: The step was not scheduled or has been updated already, or `output` is not parallel to its rows.
        """
        rows = scheduled.scheduled_requests
        if len(output.sampled_token_ids) != len(rows):
            raise ValueError(f"sampled_token_ids has {len(output.sampled_token_ids)} entries for {len(rows)} rows")
        requests = self._step_to_requests.pop(scheduled.step, None)
        if requests is None:
            raise ValueError(f"step {scheduled.step} is not under way")
        outputs = []
        for row, request, sampled_token_ids in zip(rows, requests, output.sampled_token_ids, strict=True):
            if not request.is_finished:  # not aborted since it was scheduled
                message = self._update_row(row, request, sampled_token_ids, output)
                if message is not None:
                    outputs.append(message)
        return EngineCoreOutputs(outputs, now_s, self.stats())

    def stats(self) -> SchedulerStats:
        """The state after the last step."""
        kv_cache_manager = self._kv_cache_manager
        return SchedulerStats(
            step=self._step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_free_blocks=kv_cache_manager.num_free_blocks,
            num_blocks=kv_cache_manager.num_blocks,
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=kv_cache_manager.prefix_cache_queries,
            prefix_cache_hits=kv_cache_manager.prefix_cache_hits,
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._kv_cache_manager.reset_prefix_cache()

    def _schedule_running(self, plan: StepPlan) -> None:
        running, max_num_row_tokens = self.running.requests, self._config.max_num_row_tokens
        num_visited = 0
        while num_visited < len(running):
            request = running[num_visited]
            num_visited += 1
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if not num_tokens:
                continue  # its next token is still being computed
            if num_tokens > 1:
                # A token is left for each row behind, so that no decode starves behind a prefill.
                num_tokens = min(num_tokens, plan.budget - (len(running) - num_visited), max_num_row_tokens)
            if num_tokens + request.num_computed_tokens <= request.num_slots:
                self._place(request, num_tokens, [], plan)
            elif (new_block_ids := self._make_room(request, num_tokens, plan)) is not None:
                self._place(request, num_tokens, new_block_ids, plan)

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Blocks for the request's next tokens, taken from those behind it; None if it had to give up its own."""
        num_tokens += request.num_computed_tokens
        while (new_block_ids := self._kv_cache_manager.allocate_slots(request.request_id, num_tokens)) is None:
            # Rows are placed in rank order, so the last one has not been placed in this step.
            victim = self.running.last()
            self._preempt(victim, plan)
            if victim is request:
                return None
        request.num_slots += len(new_block_ids) * self._block_size
        return new_block_ids

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        self.running.remove(victim)
        self._kv_cache_manager.free(victim.request_id)
        victim.preempt()
        self.waiting.add(victim)
        plan.preempted_request_ids.append(victim.request_id)
        self._num_preemptions += 1

    def _admit_waiting(self, plan: StepPlan) -> None:
        while self.waiting and len(self.running) < self._config.max_num_rows and plan.budget:
            if not self._admit(self.waiting.first(), plan):
                break  # nobody overtakes

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Admits the request if the step and the pool have room for it; False changes nothing."""
        computed_block_ids, num_computed_tokens = self._find_computed_blocks(request)
        num_missing_tokens = len(request.token_ids) - num_computed_tokens
        num_tokens = min(num_missing_tokens, plan.budget, self._config.max_num_row_tokens)
        if num_tokens < num_missing_tokens and not self._config.enable_chunked_prefill:
            return False
        # All its tokens have to find room now, though the step takes only a chunk: half a prompt admitted is preempted.
        if -(-num_missing_tokens // self._block_size) > self._kv_cache_manager.num_free_blocks:
            return False
        block_ids = self._kv_cache_manager.allocate_slots(
            request.request_id, num_computed_tokens + num_tokens, computed_block_ids, request.arrival.cache_salt
        )
        if block_ids is None:
            return False
        self._start(request, num_computed_tokens, len(block_ids))
        plan.introduce(request)
        self._place(request, num_tokens, block_ids, plan)
        return True

    def _find_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        if request.prompt_logprobs is not None:  # they need every prompt token computed
            return [], 0
        return self._kv_cache_manager.get_computed_blocks(
            request.request_id, request.token_ids, request.arrival.cache_salt
        )

    def _start(self, request: Request, num_computed_tokens: int, num_blocks: int) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.num_slots = num_blocks * self._block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens

    def _place(self, request: Request, num_tokens: int, new_block_ids: list[int], plan: StepPlan) -> None:
        plan.add(request, num_tokens, new_block_ids)
        num_computed_tokens = request.num_computed_tokens
        if num_computed_tokens % self._block_size < num_tokens:  # the row fills a block
            self._kv_cache_manager.cache_blocks(request.request_id, request.token_ids, num_computed_tokens)

    def _issue(self, plan: StepPlan) -> SchedulerOutput:
        self._step += 1
        self._step_to_requests[self._step] = plan.requests
        removed_request_ids, self._removed_request_ids = self._removed_request_ids, []
        scheduled = plan.finish(self._step, removed_request_ids)
        self._num_scheduled_tokens = scheduled.total_num_scheduled_tokens
        return scheduled

    def _update_row(
        self, row: ScheduledRequest, request: Request, sampled_token_ids: list[int], output: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        """Takes over one row; None when there is nothing to tell, as after a chunk of a prefill."""
        error = output.errors.get(request.request_id) if output.errors else None
        if error is not None:
            return self._fail(request, error)
        if request.prompt_logprobs is not None:
            collect_prompt_logprobs(request, output)
        if row.num_computed_tokens + row.num_scheduled_tokens != len(request.token_ids):
            return None
        if not sampled_token_ids:
            return self._fail(request, "The model runner sampled no token.")
        new_token_ids, stop = append_until_stop(request, sampled_token_ids)
        if stop is not None:
            self._retire(request, stop.status)
        elif not request.has_more_to_tell:
            return EngineCoreOutput(request.request_id, new_token_ids)  # nearly all of them
        return build_output(request, new_token_ids, stop, output)

    def _fail(self, request: Request, error: str) -> EngineCoreOutput:
        self._retire(request, RequestStatus.FINISHED_ERROR)
        return build_error(request, error)

    def _retire(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._kv_cache_manager.free(request.request_id)
            self._removed_request_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.finish(status)
        del self._requests[request.request_id]
