"""A run of the real scheduler and cache through a trace, on a virtual clock."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client.prediction import StepLimits
from llmstack_engine_client.prediction.cost_model import CostModel, LinearCostModel
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_engine_client.routing import Router, RoutingPolicy
from llmstack_insight.simulate.predictions import PredictionErrors, TracePredictor
from llmstack_insight.simulate.prompts import PromptMaker, num_unbounded_blocks
from llmstack_insight.simulate.replica import PromptCacheManager, Replica
from llmstack_insight.simulate.report import Report
from llmstack_insight.simulate.traces import TraceRequest


class Arrivals(StrEnum):
    """How requests arrive: as in the trace, or all at once."""

    TRACE = "trace"
    """When the trace says."""
    SEQUENTIAL = "sequential"
    """When the one before has ended: what the cache can do at best, without any load."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """The configuration of a simulation.

    Attributes:
        scheduler: Its `max_model_len` is raised to the longest request of the trace.
        num_blocks: Blocks of each replica; None gives its pool as many as are needed to evict nothing.
        ttft_target_s: A request counts as good output if its first token comes within this time.
        num_replicas: Engine cores that share the requests.
        routing: How one of them is chosen.
        load: The share of the capacity that the requests take, by which their arrivals are moved; None leaves them.
        knows_sessions: Whether the cache evicts by sessions, in place of the least recently used.
        predicts: Whether the first token of each request is predicted as well.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    arrivals: Arrivals = Arrivals.TRACE
    ttft_target_s: float = 2.0
    num_replicas: int = 1
    routing: RoutingPolicy = RoutingPolicy.EXACT
    load: float | None = None
    predicts: bool = False
    knows_sessions: bool = False


def simulate(trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel | None = None) -> Report:
    """Runs the whole trace.

    Raises:
        SimulationError: A setting is not valid, or the scheduler makes no progress.
    """
    cost_model = cost_model or LinearCostModel()
    try:
        if config.load is not None:
            trace = at_load(trace, config, cost_model)
        return _Simulation(trace, config, cost_model).run()
    except ValueError as error:
        raise SimulationError(str(error)) from error


def at_load(trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel) -> Sequence[TraceRequest]:
    """The trace with another clock: as its requests come, they take the share `config.load` of the capacity.

    All of them at once take some time. At a load of 1 they arrive over just that time.
    """
    if not config.load or config.load < 0:
        raise SimulationError(f"load must be above 0, got {config.load}")
    at_once = [replace(request, arrival_s=0.0) for request in trace]
    whole_s = _Simulation(at_once, replace(config, load=None, predicts=False), cost_model).run().simulated_s
    first_s, last_s = trace[0].arrival_s, trace[-1].arrival_s
    factor = whole_s / config.load / (last_s - first_s) if last_s > first_s else 0.0
    return [replace(request, arrival_s=(request.arrival_s - first_s) * factor) for request in trace]


def hits_of_one_cache(trace: Sequence[TraceRequest], num_blocks: int, block_size: int) -> int:
    """Tokens that one cache finds where prompts are computed one by one: the most that any routing can find.

    Raises:
        SimulationError: A size makes no sense.
    """
    try:
        cache = PromptCacheManager(num_blocks, block_size, enable_prefix_caching=True)
    except ValueError as error:
        raise SimulationError(str(error)) from error
    prompts, num_hit_tokens = PromptMaker(), 0
    for number, request in enumerate(trace):
        request_id, token_ids = str(number), prompts.token_ids(request)
        block_ids, num_found = cache.get_computed_blocks(request_id, token_ids)
        if cache.allocate_slots(request_id, len(token_ids), block_ids) is None:
            continue
        num_hit_tokens += num_found
        cache.num_prompt_tokens[request_id] = len(token_ids)
        cache.cache_blocks(request_id, token_ids, len(token_ids))
        cache.free(request_id)
        del cache.num_prompt_tokens[request_id]
    return num_hit_tokens


class _Simulation:
    def __init__(self, trace: Sequence[TraceRequest], config: SimulationConfig, cost_model: CostModel) -> None:
        if config.num_replicas < 1:
            raise SimulationError(f"num_replicas must be at least 1, got {config.num_replicas}")
        longest = max(request.num_prompt_tokens + request.num_output_tokens for request in trace)
        limits = replace(config.scheduler, max_model_len=max(config.scheduler.max_model_len, longest))
        self._is_sequential = config.arrivals is Arrivals.SEQUENTIAL
        num_concurrent = 1 if self._is_sequential else limits.max_num_rows
        num_blocks = config.num_blocks or num_unbounded_blocks(trace, config.block_size, num_concurrent)
        self._trace = trace
        self._prompts = PromptMaker()
        self._report = Report(
            num_blocks=num_blocks, block_size=config.block_size, ttft_target_s=config.ttft_target_s,
            cost_model=cost_model, num_replicas=config.num_replicas, routing=config.routing,
        )  # fmt: skip
        # Prompts are made when they are due and not a whole queue of them: this many may wait inside a scheduler.
        max_made = 1 if self._is_sequential else 2 * limits.max_num_rows
        self._replicas = [
            Replica(
                limits,
                PromptCacheManager(
                    num_blocks, config.block_size, config.enable_prefix_caching, knows_sessions=config.knows_sessions
                ),
                cost_model,
                self._prompts.token_ids,
                max_made,
                self._report,
                self._make_predictor(config, limits),
            )
            for _ in range(config.num_replicas)
        ]
        self._router = self._make_router(config) if config.num_replicas > 1 else None
        self._next = 0
        self._working: list[tuple[float, int]] = []  # a heap of times and replicas, each replica with work once

    def _make_predictor(self, config: SimulationConfig, limits: SchedulerConfig) -> TracePredictor | None:
        if not config.predicts:
            return None
        if config.num_replicas > 1:
            raise SimulationError("predictions are for one replica")
        self._report.predictions = errors = PredictionErrors()
        return TracePredictor(StepLimits.of(limits), config.block_size, errors)

    def _make_router(self, config: SimulationConfig) -> Router:
        router = Router(config.num_replicas, config.routing)
        if config.routing is RoutingPolicy.EXACT and config.enable_prefix_caching:
            router.set_block_size(config.block_size)
            for index, one in enumerate(self._replicas):
                router.apply(index, one.follow_cache())
        return router

    def run(self) -> Report:
        """The whole trace, step by step; always the replica that is furthest behind."""
        began_s = time.perf_counter()
        trace, working = self._trace, self._working
        while self._next < len(trace) or working:
            if self._is_next_due():
                self._route(trace[self._next])
                continue
            index = working[0][1]
            one = self._replicas[index]
            one.step()
            if one.has_work():
                heapq.heapreplace(working, (one.now_s, index))
            else:
                heapq.heappop(working)
            if self._router is not None:
                self._tell(self._router, index)
        self._finish(time.perf_counter() - began_s)
        return self._report

    def _is_next_due(self) -> bool:
        if self._next == len(self._trace):
            return False
        if self._is_sequential or not self._working:
            return not self._working
        return self._trace[self._next].arrival_s <= self._working[0][0]

    def _route(self, request: TraceRequest) -> None:
        request_id = str(self._next)
        self._next += 1
        index = 0
        if self._router is not None:
            token_ids = self._prompts.token_ids(request)
            index = self._router.route(request_id, token_ids, "", [one.num_requests for one in self._replicas])
        one = self._replicas[index]
        arrival_s = max(other.now_s for other in self._replicas) if self._is_sequential else request.arrival_s
        had_work = one.has_work()
        one.submit(request_id, request, arrival_s)
        if not had_work:
            heapq.heappush(self._working, (one.now_s, index))
        self._note_queue()

    def _tell(self, router: Router, index: int) -> None:
        """Tells the router what the live client would learn of the step."""
        one = self._replicas[index]
        update = one.take_update()
        if update is not None:
            router.apply(index, update)
        for request_id in one.begun_ids:
            router.begin(request_id)
        for request_id in one.ended_ids:
            router.end(request_id)
        one.begun_ids.clear()
        one.ended_ids.clear()

    def _note_queue(self) -> None:
        if not self._is_sequential:
            num_waiting = sum(one.num_waiting for one in self._replicas)
            self._report.max_waiting = max(self._report.max_waiting, num_waiting)

    def _finish(self, wall_s: float) -> None:
        report = self._report
        report.num_preemptions = sum(one.num_preemptions for one in self._replicas)
        report.num_evictions = sum(one.num_evictions for one in self._replicas)
        report.num_computed_tokens = [one.num_computed_tokens for one in self._replicas]
        report.simulated_s = max(one.now_s for one in self._replicas)
        report.wall_s = wall_s
