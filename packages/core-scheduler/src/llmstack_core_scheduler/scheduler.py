"""The scheduler: chooses what each step computes and applies its results."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_core_scheduler.adapter_places import AdapterPlaces
from llmstack_core_scheduler.admission import check_block_sharing, check_fork, check_id, longest_length
from llmstack_core_scheduler.allocation_plan import plan_allocation, waits_for_progress
from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.cache_operations import CacheOperations
from llmstack_core_scheduler.chunks import Chunks
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.deadline_queue import make_waiting_queue
from llmstack_core_scheduler.drafting import Drafting
from llmstack_core_scheduler.encoding import Encoding, accept_media
from llmstack_core_scheduler.forking import Forking
from llmstack_core_scheduler.place_shares import admission_order, rows_to_yield
from llmstack_core_scheduler.preemption import CheapestPreemption, PreemptionPolicy
from llmstack_core_scheduler.preemptor import Preemptor
from llmstack_core_scheduler.prefix_transfer import PrefixTransfer
from llmstack_core_scheduler.prompt_lookups import LONG_PROMPT_TOKENS, PromptLookups
from llmstack_core_scheduler.protocols import DraftSource, KVCacheManager
from llmstack_core_scheduler.request import Request, StatusListener
from llmstack_core_scheduler.request_queue import POLICIES, RequestQueue, SchedulingPolicy
from llmstack_core_scheduler.starvation_guard import leaves_room_for_protected
from llmstack_core_scheduler.step_plan import StepPlan, StepUnderWay, check_results, count_left_tokens, is_under_way
from llmstack_core_scheduler.step_results import StepResults
from llmstack_core_scheduler.step_stats import NO_STEP, step_stats
from llmstack_core_scheduler.waiting_queue import AdmissionOrder
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    ModelRunnerOutput,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
)


class Scheduler(CacheOperations):
    """Continuous batching under one token budget: running requests first, then waiting ones, prefill and decode alike.

    A pure function of its calls: no clock, no randomness, no I/O, no order of a set. Equal calls give equal decisions.

    The request that goes first by policy always advances: blocks are taken from the one that goes last. A preempted
    request loses its blocks and its row, and is resumed later as a new one with all its tokens, computed again or
    swapped in. `starvation_guard` bounds how often.

    The next step may be scheduled before the last one is updated (asynchronous scheduling): a row then begins with the
    token that the step under way samples. Where that token ends its request, the row's result is dropped.

    Attributes:
        running: Requests that hold blocks, by rank.
        media_numbers: Of the items in the keys of its cache; None for a model of tokens.
        waiting: Requests that hold none, new, preempted and swapped out, by rank.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        policy: SchedulingPolicy | None = None,
        *,
        preemption: PreemptionPolicy | None = None,
        draft_source: DraftSource | None = None,
        on_status: StatusListener | None = None,
    ) -> None:
        """`policy` replaces the one that `config.policy` names; `preemption` decides where there are host blocks.

        `on_status` receives each state that a request enters, from WAITING on; it must not call the scheduler.
        """
        self._policy, self.running = policy or POLICIES[config.policy], RequestQueue()
        self.waiting = make_waiting_queue(self._policy, config.fair_quantum)
        self._config, self._max_num_row_tokens = config, config.max_num_row_tokens
        self._kv_cache_manager, self._block_size = kv_cache_manager, kv_cache_manager.block_size
        self._has_windows, self._num_host_blocks = kv_cache_manager.has_windows, kv_cache_manager.num_host_blocks
        self._encoding = None if config.media is None else Encoding(config, config.media, self.running, self.waiting)
        self.media_numbers = None if self._encoding is None else self._encoding.numbers
        self._needs, self._lookups = BlockNeeds(config, kv_cache_manager), PromptLookups(kv_cache_manager)
        self._chunks = Chunks(config, kv_cache_manager, self._encoding, self._needs, self.waiting)
        self._states = self._chunks.states
        self._preemptor = Preemptor(preemption or CheapestPreemption(), config.max_num_preemptions, kv_cache_manager)
        self._forking, self._prefixes = Forking(kv_cache_manager), PrefixTransfer(kv_cache_manager, self.media_numbers)
        self._drafting = Drafting(draft_source, config, kv_cache_manager)
        self._results = StepResults(
            kv_cache_manager, self._drafting, self._encoding,
            self._with_kv, self._retire, self._start_again, self._cache_blocks,
        )  # fmt: skip
        self._on_status, self._sessions, self._last_step = on_status, kv_cache_manager.sessions, NO_STEP
        self._num_arrivals = self._step = self._num_swapped = self._num_protected = self._stage_tokens = 0
        self._requests: dict[str, Request] = {}
        self._steps_under_way: dict[int, StepUnderWay] = {}
        self._removed_request_ids: list[str] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: It can never fit, its id is in use, or it may not share blocks with `fork_of`.
        """
        parent = self._requests.get(request.fork_of) if request.fork_of else None
        if parent is not None:
            check_fork(request, parent)
        self.waiting.add(self._accept(request, parent))

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> int:
        """Adds a request that goes on from where a running one is; how many of its tokens need not be computed.

        The child's prompt is usually all the parent's tokens and one or more others, as in beam search. It holds its
        blocks from now on, so the parent may be aborted at once. Without room it waits and computes: the answer is 0.

        Raises:
            InvalidRequestError: There is no such parent, it may not share its blocks, or the child cannot be added.
        """
        if (parent := self._requests.get(parent_id)) is None:
            raise InvalidRequestError(f"There is no request '{parent_id[:64]}' to fork.", param="parent_id")
        check_block_sharing(child, parent)
        forked = self._accept(child, None)
        num_tokens = self._forking.fork(parent, forked) if self._can_fork(parent, forked) else 0
        if num_tokens:
            self.waiting.join(forked, num_tokens)
        (self.running if num_tokens else self.waiting).add(forked)
        return num_tokens

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and frees their blocks; unknown ids are ignored. Results for them are dropped."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._retire(request, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """True while a step has work, or the runner has not received the removal of a request."""
        return bool(self._requests or self._removed_request_ids)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step. `now_s` is when: for the cost of preemption, and deadlines."""
        if self._config.has_small_steps:
            num_tokens = count_left_tokens(self.running.requests) + self.waiting.num_prefill_tokens
            self._stage_tokens = self._config.stage_tokens(self._stage_tokens, num_tokens)
        self._sessions.now_s = now_s
        plan = StepPlan(self._config, len(self.running.requests), self._stage_tokens)
        if self._forking.request_id_to_copies:
            self._forking.copy(plan)
        if self._has_windows:
            self._needs.free_passed(self.running.requests)
        if self._lookups.pending:
            self._lookups.go_on(self._last_step[0])
        self._chunks.begin_step(self.running.requests, bool(self.waiting.requests))
        if self.waiting.requests and len(self.running) >= self._config.max_num_rows:
            for row in rows_to_yield(self.waiting, self.running.requests, plan, self._config, now_s, self._waits):
                self._preempt(row, plan, yields_place=True)
        self._schedule_running(plan)
        if self.waiting.requests and not plan.has_preempted:
            self._admit_waiting(plan, now_s)
        if self._chunks.turns is not None:
            self._chunks.turns.fill(plan)
        self._drafting.extend(plan)
        if self._states is not None:
            self._states.finish(plan)
        return self._issue(plan, now_s)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Applies the step's results: appends tokens, ends requests, frees blocks. Steps come in their order.

        Raises:
            ValueError: The step was not scheduled, has been updated already or is not the first of those under way, or
                `output` is not parallel to its rows; nothing has changed.
        """
        rows = scheduled.scheduled_requests
        check_results(rows, output)
        if next(iter(self._steps_under_way), None) != scheduled.step:
            raise ValueError(f"step {scheduled.step} is not under way, or not the first that is")
        requests, start_s, num_left_tokens = self._steps_under_way.pop(scheduled.step)
        update_row = self._results.update_row
        outputs = self._results.fail_media(rows, requests, output.errors) if output.errors else []
        for row, request, sampled_token_ids in zip(rows, requests, output.sampled_token_ids, strict=True):
            if not request.is_finished:  # not aborted or ended since it was scheduled
                message = update_row(row, request, sampled_token_ids, output, scheduled.step)
                if message is not None:
                    outputs.append(message)
        if self._num_host_blocks:
            self._preemptor.observe(scheduled, start_s, now_s)
        self._chunks.observe(scheduled, start_s, now_s)
        self._last_step = (scheduled.total_num_scheduled_tokens, len(rows), num_left_tokens)
        return EngineCoreOutputs(outputs, now_s, self.stats())

    def stats(self) -> SchedulerStats:
        """The state after the last step."""
        return step_stats(
            self._step, self._last_step, len(self.running.requests), self.waiting, self._num_swapped,
            self._kv_cache_manager, self._preemptor, self._forking, self._drafting, self._encoding,
        )  # fmt: skip

    def _accept(self, request: EngineCoreRequest, parent: Request | None) -> Request:
        check_id(request, self._requests)
        max_num_tokens = longest_length(request, self._config.max_model_len, self._needs)
        rank = self._policy.rank(request, self._num_arrivals)
        accepted = Request(request, rank, max_num_tokens, parent, self._on_status)
        accept_media(accepted, self._encoding)
        self._num_arrivals += 1
        self._requests[accepted.request_id] = accepted
        accepted.change_status(RequestStatus.WAITING)
        return accepted

    def _can_fork(self, parent: Request, child: Request) -> bool:
        return (
            parent.status is RequestStatus.RUNNING
            and not child.needs_whole_prompt
            and len(self.running) < self._config.max_num_rows
            and self._has_room_for(child)
        )

    def _schedule_running(self, plan: StepPlan) -> None:
        running, max_num_row_tokens = self.running.requests, self._max_num_row_tokens
        add_row, block_size, encoding = plan.add, self._block_size, self._encoding
        num_unknown_tokens = plan.num_unknown_tokens if self._steps_under_way else 0
        num_visited = 0
        while num_visited < len(running) and len(plan.rows) < plan.max_num_rows:
            request = running[num_visited]
            num_visited += 1
            num_tokens = request.num_tokens - request.num_computed_tokens
            if not num_tokens:
                continue  # what follows depends on a step under way
            if num_tokens > 1 or (encoding is not None and request.num_computed_tokens < request.media_end):
                # A token is left for each row behind, so that no decode starves behind a prefill.
                num_tokens = min(num_tokens, plan.budget - (len(running) - num_visited), max_num_row_tokens)
                num_tokens = self._chunks.cut(request, request.num_computed_tokens, num_tokens, plan)
                if not num_tokens:
                    plan.leave(request)
                    continue
            end = request.num_computed_tokens + num_tokens
            new_block_ids = [] if end <= request.num_slots else self._make_room(request, end, plan)
            if new_block_ids is not None:
                add_row(request, num_tokens, new_block_ids)
                if (end - num_unknown_tokens) % block_size < num_tokens:
                    self._cache_blocks(request)  # the row fills a block

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Blocks for the request's first `num_tokens`, taken from those behind; None if it had to give up its own."""
        while (new_block_ids := self._kv_cache_manager.allocate_slots(request.request_id, num_tokens)) is None:
            # Rows are placed in rank order, so the last one has not been placed in this step.
            victim = self.running.last()
            self._preempt(victim, plan)
            if victim is request:
                return None
        request.num_slots += self._needs.num_slots(new_block_ids)
        return self._forking.introduce(request, plan) or new_block_ids

    def _preempt(self, victim: Request, plan: StepPlan, *, yields_place: bool = False) -> None:
        self.running.remove(victim)
        self._drafting.forget(victim)
        was_protected, is_unknown = victim.is_protected, self._forking.forget(victim.request_id)
        can_swap = not is_unknown and not victim.pools_whole_prompt
        self._preemptor.preempt(victim, plan, self._step, can_swap=can_swap, yields_place=yields_place)
        self.waiting.add(victim)
        if not is_unknown:
            plan.preempted_request_ids.append(victim.request_id)
        self._num_swapped += victim.status is RequestStatus.SWAPPED
        self._num_protected += victim.is_protected and not was_protected

    def _admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        num_places, has_time = self._config.max_num_rows, self._chunks.has_time
        order = admission_order(self.waiting, num_places, len(self.running), now_s)
        places = AdapterPlaces(self.running.requests, self._config.max_loras)
        while plan.budget and has_time() and len(self.running) < num_places and (request := order.next()):
            if not places.has_room(request) or self._waits(request, plan):
                order.skip(request)
            elif not self._admit(request, plan, order, places):
                break  # no request overtakes one that waits for room
            elif request.status is RequestStatus.RUNNING:
                places.add(request)

    def _waits(self, request: Request, plan: StepPlan) -> bool:
        """Whether it waits for progress, also while a stage may still compute a row that it has lost."""
        has_begun, steps = request.num_cached_tokens >= 0, self._steps_under_way.values()
        is_computed = has_begun and self._config.pipeline_parallel_size > 1 and is_under_way(request.request_id, steps)
        if is_computed or waits_for_progress(request, plan, self._config):
            return True
        return request.num_tokens > LONG_PROMPT_TOKENS and self._lookups.waits(request, self._step, self._last_step[0])

    def _admit(self, request: Request, plan: StepPlan, order: AdmissionOrder, places: AdapterPlaces) -> bool:
        """Admits the request if the step and the pool have room for it; False changes nothing.

        One that waits for the encoder is skipped, unless that is at work for it: then it runs without a row.
        """
        allocation = plan_allocation(request, self._kv_cache_manager, self._needs, plan)
        start, can_cut = allocation.num_computed_tokens, self._config.enable_chunked_prefill
        num_tokens = min(request.num_tokens - start, plan.budget, self._max_num_row_tokens)
        if (start + num_tokens < request.num_tokens and not can_cut) or not plan.has_room_for_prefill(num_tokens):
            return False
        # All its tokens have to find room now, though the step takes only a chunk: half a prompt admitted is preempted.
        if allocation.num_needed_blocks > self._kv_cache_manager.num_free_blocks or not self._has_room_for(request):
            return False
        num_tokens = self._chunks.cut(request, start, num_tokens, plan)
        if not num_tokens and self._encoding and not (can_cut and self._encoding.has_begun(request, start)):
            places.wait_for_encoder(request, order)
            return can_cut  # whole prompts are encoded one after the other
        if (block_ids := allocation.allocate(start + max(num_tokens, 1), plan)) is None:
            return False
        self._start(request, start)
        if not num_tokens:
            self._forking.hold(request, allocation.num_held_tokens, plan)
            return True
        request.num_slots = self._needs.num_slots(block_ids)
        plan.introduce(request, allocation.num_held_tokens)
        plan.add(request, num_tokens, block_ids)
        self._cache_blocks(request)
        return True

    def _has_room_for(self, request: Request) -> bool:
        running, num_free_blocks = self.running.requests, self._kv_cache_manager.num_free_blocks
        return not self._num_protected or leaves_room_for_protected(request, running, num_free_blocks, self._needs)

    def _start(self, request: Request, num_computed_tokens: int) -> None:
        self.waiting.admit(request, num_computed_tokens)
        self.running.add(request)
        self._num_swapped -= request.status is RequestStatus.SWAPPED
        request.change_status(RequestStatus.RUNNING)
        request.parent, request.num_computed_tokens = None, num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
            arrival = request.arrival
            self._sessions.begin(
                request.request_id, request.keys, request.prefix_salt, num_computed_tokens, arrival.tenant,
                num_known_tokens=request.num_known_tokens, name=arrival.session, is_final=arrival.is_session_final,
                disk_miss=arrival.disk_miss, is_looked_up=not request.needs_whole_prompt,
            )  # fmt: skip
        elif request.num_lost_tokens:
            self._sessions.resume(request.num_lost_tokens - num_computed_tokens)
            request.num_lost_tokens = 0

    def _cache_blocks(self, request: Request) -> None:
        """Makes the blocks that a row fills findable; a token not known yet leaves its block for later."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        self._kv_cache_manager.cache_blocks(request.request_id, request.keys, num_tokens)

    def _issue(self, plan: StepPlan, now_s: float) -> SchedulerOutput:
        self._step += 1
        self._steps_under_way[self._step] = StepUnderWay(plan.requests, now_s, plan.num_left_tokens)
        removed_request_ids, self._removed_request_ids = self._removed_request_ids, []
        self._preemptor.num_swapped_in_blocks += len(plan.swap_ins)
        self._forking.num_forks += plan.num_forks
        return plan.finish(self._step, removed_request_ids)

    def _with_kv(self) -> list[Request]:
        return [*self.running, *(one for one in self.waiting.requests if one.status is RequestStatus.SWAPPED)]

    def _start_again(self, requests: Iterable[Request], of_step: list[Request]) -> None:
        """Lets requests be computed again: what the rows `of_step`, and steps under way, sample for them is void."""
        for request in requests:
            is_swapped = request.status is RequestStatus.SWAPPED
            (self.waiting if is_swapped else self.running).remove(request)
            self._num_swapped -= is_swapped
            if not is_swapped:
                self._drafting.forget(request)
                if not self._forking.forget(request.request_id):
                    self._removed_request_ids.append(request.request_id)
            self._kv_cache_manager.free(request.request_id)
            for rows in (of_step, *(step.requests for step in self._steps_under_way.values())):
                rows[:] = [one.ghost() if one is request else one for one in rows]
            request.start_again(self._step)
            self.waiting.add(request)

    def _retire(self, request: Request, status: RequestStatus) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._drafting.end(request, status)
            if not self._forking.forget(request.request_id):
                self._removed_request_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
            self._lookups.drop(request)
        self._sessions.end(request.request_id, *request.ending(status), request.keys)
        self._kv_cache_manager.free(request.request_id)
        self._num_swapped -= request.status is RequestStatus.SWAPPED
        self._num_protected -= request.is_protected
        request.finish(status)
        self.waiting.finish(request)
        del self._requests[request.request_id]
