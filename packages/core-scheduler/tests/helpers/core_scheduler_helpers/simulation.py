"""A seeded simulation of scheduler, cache and runner under a virtual clock.

A seed decides everything: sizes, limits, policies, arrivals, forks, drafts, aborts at any moment, failing rows,
crashes, and whether steps are scheduled ahead. So a failure is replayed by its seed. The model is a hash of all tokens
before, so the right answer of a request is known whatever was preempted, swapped, shared, forked or guessed on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from core_scheduler_helpers.drawn import ONE_STAGE_ONLY, VOCAB_SIZE, GuessingDrafts, draw_config, repetitive_token
from core_scheduler_helpers.places import Places, Yields, all_advance, wrong_counts
from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.fair_queue import FairQueue
from llmstack_core_scheduler.ngram_drafts import NgramDrafts
from llmstack_core_scheduler.preemption import AlwaysRecompute, AlwaysSwap, CheapestPreemption, PreemptionPolicy
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.scheduler import Scheduler
from llmstack_core_scheduler.speculative_config import SpeculativeConfig
from llmstack_core_scheduler.suffix_drafts import SuffixDrafts
from llmstack_core_scheduler.testing import DecisionHash, FakeModelRunner, next_token
from llmstack_types import (
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
)

MAX_NUM_STEPS = 20_000
MAX_NUM_CRASHES, MAX_NUM_FORKS = 3, 30
_PREEMPTION_POLICIES: tuple[Callable[[], PreemptionPolicy], ...] = (AlwaysRecompute, AlwaysSwap, CheapestPreemption)
_LOOKUP, _SUFFIX = SpeculativeConfig("ngram", 4, 2, 1), SpeculativeConfig("suffix", 4)
BLOCK_SIZES = (1, 2, 3, 4, 7, 8, 16, 32, 64)

ManagerFactory = Callable[[int, int, int], KVCacheManager]
"""From blocks, block size and host blocks to a manager."""


class BrokenInvariantError(Exception):
    """An invariant of the scheduler did not hold; the text says which."""


class Simulation:
    """One run; `run` raises where an invariant is broken.

    Attributes:
        totals: What happened, for judging whether the runs are messy enough.
        log: The calls of the scheduler, as (name, arguments), for replay.
    """

    def __init__(
        self,
        seed: int,
        make_manager: ManagerFactory,
        sliding_windows: Sequence[int | None] = (None,),
        num_stages: int = 1,
        num_state_blocks: int = 0,
    ) -> None:
        """`sliding_windows` are those of the groups of layers that the managers have, which may have states too."""
        random = self.random = Random(seed)  # reproducible, nothing secret
        self.config = draw_config(random, seed, has_states=num_state_blocks > 0)
        if num_stages > 1:
            self.config = replace(self.config, pipeline_parallel_size=num_stages, **ONE_STAGE_ONLY)
        self.block_size = random.choice(BLOCK_SIZES)
        # Half of the pools have room for about one long request.
        num_needed_blocks = min(-(-self.config.max_model_len // self.block_size), 45)
        self.num_blocks = random.choice([random.randint(2, 50), num_needed_blocks + random.randint(1, 4)])
        self.num_host_blocks = random.choice([0, 0, random.randint(1, 50), 200])
        self.make_preemption = random.choice(_PREEMPTION_POLICIES)
        self.has_drafts = self.config.num_lookahead_slots > 0
        self.has_lookup, self.has_suffixes = seed % 3 == 0, seed % 6 == 0
        self.num_ahead = max(random.choice([0, 0, 1]), num_stages - 1)
        self.abort_rate = random.choice([0.0, 0.02, 0.1])
        self.crash_rate = random.choice([0.0, 0.0, 0.01])
        self.fork_rate = random.choice([0.0, 0.1, 0.3])
        self.prefixes = [[random.randrange(VOCAB_SIZE) for _ in range(150)] for _ in range(3)]
        self.totals: Counter[str] = Counter()
        self.log: list[tuple[str, Any]] = []
        self.decisions = DecisionHash()
        self.alive: dict[str, EngineCoreRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.failing: set[str] = set()
        self._make_manager, self._sliding_windows = make_manager, sliding_windows
        self._num_state_blocks = num_state_blocks
        self._num_arrivals, self._now_s = 0, 0.0
        self._under_way: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self._boot()

    def run(self) -> None:
        """Runs until all work is done.

        Raises:
            BrokenInvariantError: An invariant was broken.
            WrongKVError: A row would have read what is not its own.
        """
        num_arrivals, num_steps = self.random.randint(1, 40), 0
        while num_arrivals or self._under_way or self.scheduler.has_unfinished_requests():
            while num_arrivals and self.random.random() < 0.5:
                num_arrivals -= 1
                self._arrive()
            self._step()
            num_steps += 1
            _expect(num_steps < MAX_NUM_STEPS, "the work ends")
        self._check_end()

    def make_scheduler(self) -> Scheduler:
        """A scheduler as this seed has it, over an empty cache."""
        self.manager = self._make_manager(self.num_blocks, self.block_size, self.num_host_blocks)
        self.lookup = SuffixDrafts(_SUFFIX) if self.has_suffixes else NgramDrafts(_LOOKUP)
        self.yields = Yields()
        return Scheduler(
            self.config, self.manager, preemption=self.make_preemption(),
            draft_source=(self.lookup if self.has_lookup else GuessingDrafts()) if self.has_drafts else None,
            on_status=self.yields,
        )  # fmt: skip

    def _boot(self) -> None:
        self.scheduler = self.make_scheduler()
        choose_token = (lambda _, token_ids: repetitive_token(token_ids)) if self.has_lookup else None
        self.runner = FakeModelRunner(
            self.num_blocks, self.block_size, VOCAB_SIZE, choose_token, self.num_host_blocks, self.failing,
            self._sliding_windows, self._num_state_blocks,
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> Any:
        self.log.append((name, arguments))
        return getattr(self.scheduler, name)(*arguments)

    # --- what happens ---------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        random = self.random
        length = random.randint(1, max(min(self.config.max_model_len, self._capacity) * 2 // 3, 1))
        shared = random.randint(0, length)
        prompt = random.choice(self.prefixes)[:shared]
        prompt += [random.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        request = self._request(prompt, self._params())
        self._add(request)
        for _ in range(random.choice([0, 0, 0, 1, 3])):
            fork_of = request.request_id if request.request_id in self.alive else ""
            self._add(replace(request, request_id=self._next_id(), sampling_params=self._params(), fork_of=fork_of))

    def _request(self, prompt: list[int], params: SamplingParams, priority: int | None = None) -> EngineCoreRequest:
        random = self.random
        request_id = self._next_id()
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            eos_token_ids=tuple(random.sample(range(VOCAB_SIZE), 25)),
            arrival_time_s=float(self._num_arrivals),
            priority=random.randint(-2, 2) if priority is None else priority,
            tenant=random.choice("abc"),
        )

    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.random.randint(1, 40), min_tokens=self.random.randint(0, 2))

    def _next_id(self) -> str:
        self._num_arrivals += 1
        request_id = str(self._num_arrivals)
        if self.random.random() < 0.01:
            self.failing.add(request_id)
        return request_id

    def _add(self, request: EngineCoreRequest) -> None:
        before = self._books()
        try:
            self._call("add_request", request)
        except InvalidRequestError:
            _expect(not self._can_fit(request), "what fits is accepted")
            _expect(self._books() == before, "a refusal changes nothing")
            self.totals["refused"] += 1
        else:
            _expect(self._can_fit(request), "what can never fit is refused")
            self._welcome(request)

    def _welcome(self, request: EngineCoreRequest) -> None:
        self.alive[request.request_id], self.answers[request.request_id] = request, []

    def _child(self, parent: Request, prompt: list[int]) -> EngineCoreRequest:
        return self._request(prompt, self._params(), 0)

    def _fork_some(self) -> None:
        """As beam search does: a child goes on with the parent's tokens and another one, and the parent may go."""
        for parent in self.scheduler.running.requests.copy():
            if self.random.random() >= self.fork_rate / 4 or self.totals["beams"] == MAX_NUM_FORKS:
                continue
            prompt = parent.token_ids[: self.random.randint(1, len(parent.token_ids))]
            child = self._child(parent, [*prompt, self.random.randrange(VOCAB_SIZE)])
            if not self._can_fit(child):
                continue
            num_shared = self._call("fork_request", parent.request_id, child)
            _expect(num_shared <= len(prompt), "only common tokens are shared")
            self.totals["beams"] += 1
            self._welcome(child)
            if self.random.random() < 0.5:
                self._abort(parent.request_id)

    def _abort_some(self) -> None:
        for request_id in list(self.alive):
            if self.random.random() < self.abort_rate:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._call("abort_requests", [request_id, "unknown"])
        answer, request = self.answers[request_id], self.alive.pop(request_id)
        _expect(answer == self._right_answer(request)[: len(answer)], "what was sent before the abort is right")
        self.totals["aborted"] += 1

    def _crash(self) -> None:
        """The process dies, and a new one is given all that was not answered."""
        self.totals["crashes"] += 1
        self._under_way.clear()
        self.log.append(("crash", ()))
        self._boot()
        for request in self.alive.values():
            self.answers[request.request_id] = []
            self._call("add_request", request)

    def _step(self) -> None:
        if self.random.random() < self.crash_rate and self.totals["crashes"] < MAX_NUM_CRASHES:
            self._crash()
        self._refuse_nonsense()
        self._now_s += 0.001
        oldest = self.scheduler.running.requests[0] if self.scheduler.running.requests else None
        places = Places.before(self.scheduler, self.config.max_num_rows)
        scheduled = self._call("schedule", self._now_s)
        yielded = self.yields.take()
        _expect(not (rule := places.broken_rule(yielded)), rule)
        self.totals["yields"] += len(yielded)
        self.decisions.add(scheduled)
        self._check_step(scheduled, oldest.request_id if oldest and not self._under_way else None)
        self._abort_some()
        self._under_way.append((scheduled, self.runner.execute_model(scheduled)))
        self._now_s += 0.0001 * scheduled.total_num_scheduled_tokens + 0.0002 * len(scheduled.swap_outs)
        self._abort_some()
        while len(self._under_way) > (self.num_ahead if scheduled.scheduled_requests else 0):
            self._land(*self._under_way.pop(0))
        self._fork_some()
        self._check_books()

    def _land(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for message in self._call("update_from_output", scheduled, output, self._now_s).outputs:
            _expect(message.request_id in self.alive, "no message after the end")
            answer = self.answers[message.request_id]
            answer += message.new_token_ids
            if message.finish_reason is not None:
                request = self.alive.pop(message.request_id)
                is_error = message.finish_reason is FinishReason.ERROR
                _expect(
                    is_error == (message.request_id in self.failing),
                    "a request ends with an error only if it was made to fail",
                )
                _expect(is_error or answer == self._right_answer(request), "the answer is the model's")
                self.totals[message.finish_reason] += 1

    def _refuse_nonsense(self) -> None:
        if self.random.random() >= 0.02:
            return
        before = self._books()
        request = EngineCoreRequest("nonsense", [1], SamplingParams(max_tokens=1))
        for bad, name in (
            (replace(request, prompt_token_ids=[]), "prompt"),
            (replace(request, prompt_token_ids=[-1]), "prompt_token_ids"),
            (replace(request, prompt_token_ids=[2**31]), "prompt_token_ids"),
            (replace(request, sampling_params=SamplingParams(max_tokens=-1)), "max_tokens"),
            (replace(request, sampling_params=SamplingParams(max_tokens=10**9)), "prompt"),
            *((replace(request, request_id=request_id), "request_id") for request_id in list(self.alive)[:1]),
        ):
            try:
                self.scheduler.add_request(bad)
            except InvalidRequestError as error:
                _expect(error.param == name, "a refusal names the argument")
            else:
                raise BrokenInvariantError(f"accepted {bad}")
        self.scheduler.abort_requests(["nonsense", "", "unknown"])
        _expect(self._books() == before, "a refusal changes nothing")

    # --- what must hold -------------------------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        """Tokens of the longest request that the pool has room for."""
        if self.has_windows:
            return BlockNeeds(self.config, self.manager).longest_length(self.config.max_model_len + 1)
        return self.num_blocks * self.block_size

    @property
    def has_windows(self) -> bool:
        """Whether some group of layers has a sliding window."""
        return tuple(self._sliding_windows) != (None,)

    def _can_fit(self, request: EngineCoreRequest) -> bool:
        length, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens or 0
        return length + max_tokens <= self.config.max_model_len and length + max_tokens - 1 <= self._capacity

    def _right_answer(self, request: EngineCoreRequest) -> list[int]:
        params, tokens, answer = request.sampling_params, list(request.prompt_token_ids), list[int]()
        while len(answer) < (params.max_tokens or 0):
            text = tokens + answer
            answer.append(repetitive_token(text) if self.has_lookup else next_token(text, VOCAB_SIZE))
            if answer[-1] in request.eos_token_ids and len(answer) >= params.min_tokens:
                break
        return answer

    def _books(self) -> tuple[Any, ...]:
        queues = (self.scheduler.running, self.scheduler.waiting)
        return (*([request.request_id for request in queue] for queue in queues), self.scheduler.stats())

    def _check_step(self, scheduled: SchedulerOutput, oldest: str | None) -> None:
        rows, looks_up = scheduled.scheduled_requests, bool(self.scheduler._lookups.pending)
        row_ids = [row.request_id for row in rows]
        num_tokens = sum(row.num_scheduled_tokens for row in rows)
        _expect(scheduled.total_num_scheduled_tokens == num_tokens, "the tokens of a step are those of its rows")
        _expect(scheduled.total_num_scheduled_tokens <= self.config.max_num_batched_tokens, "a step keeps its budget")
        _expect(len(rows) <= self.config.max_num_rows, "a step keeps its number of rows")
        _expect(len(set(row_ids)) == len(row_ids), "a request has one row")
        _expect(oldest is None or row_ids[0] == oldest, "the oldest always advances")
        if not self._under_way:
            _expect(bool(rows) or looks_up or not self.alive, "with work there is a step")
            has_turns = self.config.pipeline_parallel_size > 1  # then a step takes a share of them
            _expect(has_turns or all_advance(self.scheduler, row_ids), "every running request advances")
        drafts, copies = sum(len(row.draft_token_ids) for row in rows), len(scheduled.block_copies)
        swaps = {"swap_outs": len(scheduled.swap_outs), "swap_ins": len(scheduled.swap_ins)}
        self.totals += Counter(steps=1, drafts=drafts, copies=copies, lookups=looks_up, **swaps)

    def _check_books(self) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.running.requests, scheduler.waiting.requests
        ids = [request.request_id for request in running + waiting]
        _expect(sorted(ids) == sorted(self.alive), "each request is in exactly one state")
        for queue in (running, waiting):
            ranks = [request.rank for request in queue]
            _expect(ranks == sorted(ranks), "queues are in order")
        _expect(all(request.status is RequestStatus.RUNNING for request in running), "who runs is running")
        most = max((request.num_preemptions for request in running + waiting), default=0)
        _expect(most <= self.config.max_num_preemptions, "nobody is preempted without end")
        held = {block_id for request in running for block_id in self.manager.block_table(request.request_id)}
        held -= set(range(self.num_blocks - self.manager.num_blocks))  # the null block
        _expect(
            self.manager.num_free_blocks + len(held) == self.manager.num_blocks, "free and used blocks are all blocks"
        )
        self._check_windows(running)
        self._check_tenants()
        _expect(not wrong_counts(scheduler), "the rows of each tenant are counted")
        check_integrity = getattr(self.manager, "check_integrity", None)
        if check_integrity is not None:
            check_integrity()
        stats = scheduler.stats()
        swapped = [request for request in waiting if request.status is RequestStatus.SWAPPED]
        _expect(stats.num_swapped == len(swapped), "swapped requests are counted")
        self.totals["protected"] += any(request.is_protected for request in running)

    def _check_tenants(self) -> None:
        waiting, stats = self.scheduler.waiting, self.scheduler.stats()
        expected = sum(request.num_queued_tokens for request in waiting.requests)
        _expect(waiting.num_tokens == expected, "waiting tokens are counted")
        if isinstance(waiting, FairQueue):
            _expect(sum(stats.num_waiting_tokens_per_tenant) == expected, "waiting tokens are counted per tenant")
            tenants = {request.tenant for request in self.alive.values()}
            _expect(all(name in tenants or not waiting.deficit_of(name) for name in "abc"), "nobody is remembered")

    def _check_windows(self, running: Sequence[Request]) -> None:
        """A request that has just computed holds no block that its windows had passed before that step."""
        for request in running if self.has_windows else ():
            num_held = len(self.manager.block_table(request.request_id)) - self.manager.block_table(
                request.request_id
            ).count(0)
            num_tokens = request.num_slots or request.num_computed_tokens
            most = self.manager.num_blocks_needed(num_tokens, 0, self.config.max_num_batched_tokens)
            _expect(num_held <= most, "windows free what they have passed")
            self.totals["passed"] += len(self._sliding_windows) * -(-num_tokens // self.block_size) - num_held

    def _check_end(self) -> None:
        stats = self.scheduler.stats()
        self.totals += Counter(preemptions=stats.num_preemptions, hits=stats.prefix_cache_hits)
        self.totals += Counter(accepted=stats.num_accepted_draft_tokens, shared=stats.num_forks)
        self.totals += Counter(without_state=self.manager.prefix_tokens_without_state)
        _expect(not self.alive, "all requests end")
        _expect(self.manager.num_free_blocks == self.manager.num_blocks, "no block is left behind")
        _expect(self.manager.num_free_host_blocks == self.num_host_blocks, "no host block is left behind")
        _expect(self.manager.reset_prefix_cache(), "an idle cache can be reset")
        _expect(self.lookup.num_indexed_tokens == 0, "the source of drafts remembers nobody")
        _expect(self.runner.request_ids == [], "the runner has no row left")
        _expect((stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0), "nobody is left")


def _expect(is_so: bool, invariant: str) -> None:
    if not is_so:
        raise BrokenInvariantError(f"not so: {invariant}")
