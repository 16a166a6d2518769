"""A run of the real scheduler and cache through a trace, on a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_core.simulate.cost_model import CostModel, LinearCostModel, step_work
from llmstack_engine_core.simulate.errors import SimulationError
from llmstack_engine_core.simulate.prompts import PromptMaker, num_unbounded_blocks
from llmstack_engine_core.simulate.report import Report
from llmstack_engine_core.simulate.runner import TraceRunner
from llmstack_engine_core.simulate.traces import TraceRequest
from llmstack_kv_cache import KVCacheManager
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, InvalidRequestError, SamplingParams, SchedulerOutput

MAX_IDLE_STEPS = 1000


class Arrivals(StrEnum):
    """How requests arrive: as in the trace, or all at once."""

    TRACE = "trace"
    """When the trace says."""
    SEQUENTIAL = "sequential"
    """When the one before has ended: what the cache can do at best, without any load."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What is simulated.

    Attributes:
        scheduler: Its `max_model_len` is raised to the longest request of the trace.
        num_blocks: None gives the pool as many as are needed to evict nothing.
        ttft_target_s: A request counts as good output if its first token comes within this time.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    arrivals: Arrivals = Arrivals.TRACE
    ttft_target_s: float = 2.0


def simulate(trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel | None = None) -> Report:
    """Runs the whole trace.

    Raises:
        SimulationError: A setting is not valid, or the scheduler makes no progress.
    """
    try:
        return _Simulation(trace, config, cost_model or LinearCostModel()).run()
    except ValueError as error:
        raise SimulationError(str(error)) from error


class _PromptCacheManager(KVCacheManager):
    """Caches prompts only: a trace does not say what a later prompt repeats of an answer."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.num_prompt_tokens: dict[str, int] = {}

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the full blocks of the prompt findable."""
        super().cache_blocks(request_id, token_ids, min(num_computed_tokens, self.num_prompt_tokens[request_id]))


@dataclass(slots=True)
class _Progress:
    arrival_s: float
    num_prompt_tokens: int
    last_token_s: float = -1.0


class _Simulation:
    def __init__(self, trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel) -> None:
        longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
        limits = replace(config.scheduler, max_model_len=max(config.scheduler.max_model_len, longest))
        self._is_sequential = config.arrivals is Arrivals.SEQUENTIAL
        num_concurrent = 1 if self._is_sequential else limits.max_num_rows
        num_blocks = config.num_blocks or num_unbounded_blocks(trace, config.block_size, num_concurrent)
        self._cache = _PromptCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(limits, self._cache)
        # Prompts are made when they are due and not a whole queue of them: this many may wait inside the scheduler.
        self._max_made = 1 if self._is_sequential else 2 * limits.max_num_rows
        self._trace = trace
        self._cost_model = cost_model
        self._runner = TraceRunner()
        self._prompts = PromptMaker()
        self._now_s = 0.0
        self._next = 0
        self._num_arrived = 0
        self._not_begun: dict[str, None] = {}
        self._progress: dict[str, _Progress] = {}
        self._report = Report(
            num_blocks=num_blocks, block_size=config.block_size, ttft_target_s=config.ttft_target_s,
            cost_model=cost_model,
        )  # fmt: skip

    def run(self) -> Report:
        """The whole trace, step by step."""
        began_s = time.perf_counter()
        num_idle_steps = 0
        while True:
            self._arrive()
            if not self._scheduler.has_unfinished_requests():
                if self._next == len(self._trace):
                    break
                self._now_s = max(self._now_s, self._trace[self._next].arrival_s)
                continue
            is_idle = self._step()
            num_idle_steps = num_idle_steps + 1 if is_idle else 0
            if num_idle_steps > MAX_IDLE_STEPS:
                raise SimulationError(f"the scheduler makes no progress at {self._now_s:.3f} s")
        self._finish(time.perf_counter() - began_s)
        return self._report

    def _arrive(self) -> None:
        """Hands over the requests that are due, if the scheduler has begun with most of those before."""
        trace = self._trace
        if self._is_sequential:
            if not self._progress and self._next < len(trace):
                self._add(trace[self._next], self._now_s)
            return
        while self._next < len(trace) and len(self._not_begun) < self._max_made:
            request = trace[self._next]
            if request.arrival_s > self._now_s:
                break
            self._add(request, request.arrival_s)
        self._note_queue()

    def _note_queue(self) -> None:
        trace, now_s = self._trace, self._now_s
        while self._num_arrived < len(trace) and trace[self._num_arrived].arrival_s <= now_s:
            self._num_arrived += 1
        num_waiting = len(self._not_begun) + max(self._num_arrived - self._next, 0)
        self._report.max_waiting = max(self._report.max_waiting, num_waiting)

    def _add(self, request: TraceRequest, arrival_s: float) -> None:
        request_id = str(self._next)
        self._next += 1
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0, seed=0)
        arrival = EngineCoreRequest(request_id, self._prompts.token_ids(request), params, arrival_time_s=arrival_s)
        try:
            self._scheduler.add_request(arrival)
        except InvalidRequestError:
            self._report.num_refused += 1
            return
        self._cache.num_prompt_tokens[request_id] = request.num_prompt_tokens
        self._progress[request_id] = _Progress(arrival_s, request.num_prompt_tokens)
        self._not_begun[request_id] = None

    def _step(self) -> bool:
        """One step; whether it computed nothing."""
        scheduled = self._scheduler.schedule(self._now_s)
        self._note_begun(scheduled)
        output = self._runner.execute(scheduled)
        if output.request_ids:
            self._now_s += self._cost_model.step_s(step_work(scheduled.scheduled_requests))
        self._take(self._scheduler.update_from_output(scheduled, output, self._now_s))
        report = self._report
        report.num_steps += 1
        report.max_running = max(report.max_running, len(output.request_ids))
        return not output.request_ids

    def _note_begun(self, scheduled: SchedulerOutput) -> None:
        for request in scheduled.new_requests:
            request_id = request.request_id
            if request_id in self._not_begun:  # not one that was preempted
                del self._not_begun[request_id]
                self._report.queue_s.append(self._now_s - self._progress[request_id].arrival_s)

    def _take(self, outputs: EngineCoreOutputs) -> None:
        now_s, report = self._now_s, self._report
        for output in outputs.outputs:
            progress = self._progress[output.request_id]
            if progress.last_token_s >= 0:
                report.itl_s.append(now_s - progress.last_token_s)
            else:
                report.ttft_s.append(now_s - progress.arrival_s)
                report.num_hit_tokens += max(output.num_cached_tokens, 0)
            progress.last_token_s = now_s
            report.num_output_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                report.num_requests += 1
                report.num_prompt_tokens += progress.num_prompt_tokens
                del self._progress[output.request_id]
                del self._cache.num_prompt_tokens[output.request_id]

    def _finish(self, wall_s: float) -> None:
        report = self._report
        report.num_preemptions = self._scheduler.stats().num_preemptions
        report.num_evictions = self._cache.stats().num_evictions
        report.simulated_s = self._now_s
        report.wall_s = wall_s
