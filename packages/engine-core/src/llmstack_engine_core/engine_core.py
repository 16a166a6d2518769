"""The engine core: requests in; schedule, execute and update in each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from llmstack_engine_core.adapter_gate import make_adapter_gate
from llmstack_engine_core.admission import check_request, error_output
from llmstack_engine_core.beams import BeamSearches
from llmstack_engine_core.block_residency import BlockResidency
from llmstack_engine_core.cache_news import CacheNews
from llmstack_engine_core.events import EventBus, StepRecorder
from llmstack_engine_core.kv_transfer.request_transfers import RequestTransfers, TransferParts
from llmstack_engine_core.profiles import NOT_ENABLED, StepProfiles
from llmstack_engine_core.protocols import ConstraintBackend, ModelRunner, PendingOutput, ShadowSource
from llmstack_engine_core.scheduler_protocol import Scheduler
from llmstack_engine_core.step_log import DeferredLog, LoggedScheduler
from llmstack_engine_core.structured_output import ConstrainedRows, GrammarGate, LazyBackend
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    InvalidRequestError,
    Operation,
    SchedulerOutput,
    SchedulerStats,
    ShadowReport,
    StepPhases,
    StepRecord,
    StepRecording,
)
from llmstack_types.control import ArgumentTs, ResultT

# How long a step waits for a grammar when there is nothing else to do; messages are read between two steps.
IDLE_WAIT_S = 0.005


class EngineCore:
    """A scheduler and a model runner in one loop. Used by one thread.

    A request enters the stages that it needs and no others: the grammar gate if it has a constraint, the beam searches
    if it is one of their beams. Every other request goes to the scheduler as it is.

    An exception from `step` ends the engine core: state of the scheduler and of the runner may differ from there on.

    Attributes:
        ready: The message about it for the front end.
        step_log: The log of the scheduler's calls, if there is one; closed at shutdown.
        recorder: The recorder of the last steps; None without one.
        cache_news: The component that follows the prefix cache; None without prefix caching.
        sleep_level: 0 while awake; 1 without KV storage, 2 without weights too.
        is_stopping: A client asked for the end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        ready: EngineReady,
        *,
        constraints: Callable[[], ConstraintBackend] | None = None,
        log_stats: bool = True,
        max_num_queued_requests: int = 65_536,
        step_log: DeferredLog | None = None,
        num_steps_under_way: int = 1,
        events: EventBus | None = None,
        recorder: StepRecorder | None = None,
        residency: BlockResidency | None = None,
        cache_news: CacheNews | None = None,
        max_cpu_loras: int = 0,
        transfer: TransferParts | None = None,
        profiles: StepProfiles | None = None,
        shadow: ShadowSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects the stages.

        `constraints` makes the backend of constrained requests; None refuses them. `step_log` logs the calls of the
        scheduler, those of the beam searches included. `num_steps_under_way` steps are started before the first of them
        has to have results. `events` is what the scheduler reports states to; `recorder` and `residency` are among its
        hooks. `max_cpu_loras` adapters are kept in memory; 0 refuses requests that name one. `transfer` is what carries
        KV blocks of requests; None refuses those that ask for it. `profiles` records what the runner computes; None
        refuses that. `shadow` follows `step_log`, and reports.
        """
        self.ready = ready
        self.step_log = step_log
        self.recorder = recorder
        self.cache_news = cache_news
        self.sleep_level, self.is_stopping = 0, False
        self._scheduler = scheduler if step_log is None else LoggedScheduler(scheduler, step_log)
        self._runner = runner
        self._events = events if events is not None else EventBus((), clock)
        constraints = constraints or LazyBackend("", None, ready.vocab_size)
        self._grammar_gate = GrammarGate(constraints, self._events.on_status)
        self._constrained_rows = ConstrainedRows(constraints)
        self._adapter_gate = make_adapter_gate(runner, max_cpu_loras, num_steps_under_way, self._events.on_status)
        self._beam_searches = BeamSearches(self._scheduler)
        self._transfers = None if transfer is None else RequestTransfers(transfer, self._scheduler, clock)
        self._profiles, self._shadow = profiles, shadow
        self._log_stats = log_stats
        self._max_num_queued_requests = max_num_queued_requests
        self._num_steps_under_way = num_steps_under_way
        self._under_way: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self._clock = clock
        self._residency = residency
        self._executed_s = 0.0
        self._request_ids: set[str] = set()
        self._constrained_ids: set[str] = set()
        self._refused: dict[str, EngineCoreOutput] = {}  # by request, until the next step
        self._operations = self._make_operations()

    def _make_operations(self) -> dict[Operation[Any, *tuple[Any, ...]], Callable[..., Any]]:
        step_log, profiles = self.step_log, self._profiles
        return {
            Control.RESET_PREFIX_CACHE: self.reset_prefix_cache,
            Control.STATS: self.stats,
            Control.SHUTDOWN: self._stop,
            Control.RECENT_STEPS: self.recent_steps,
            Control.STEP_LOG: lambda: b"" if step_log is None else step_log.dump(),
            Control.SLEEP: self.sleep,
            Control.WAKE_UP: self.wake_up,
            Control.SLEEP_LEVEL: lambda: self.sleep_level,
            Control.LOAD_ADAPTER: self.load_adapter,
            Control.UNLOAD_ADAPTER: self.unload_adapter,
            Control.START_PROFILE: lambda: NOT_ENABLED if profiles is None else profiles.start(),
            Control.STOP_PROFILE: lambda: "" if profiles is None else profiles.stop(),
        }

    @property
    def runner(self) -> ModelRunner:
        """The model runner; only the engine core's thread may use it."""
        return self._runner

    def call(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Does what a client asks for besides requests."""
        result: ResultT = self._operations[operation](*arguments)
        return result

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request; one that cannot be served gets an output with `FinishReason.ERROR` in the next step.

        Raises:
            InvalidRequestError: The id is in use: there is no output, since it would end the other request. Or the
                engine core is asleep: no step follows that could return one.
        """
        request_id = request.request_id
        if self.sleep_level:
            raise InvalidRequestError("The engine core is asleep.")
        if request_id in self._request_ids or request_id in self._refused:
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        try:
            if len(self._request_ids) >= self._max_num_queued_requests:
                raise InvalidRequestError(f"The engine core holds {self._max_num_queued_requests} requests already.")
            self._check(request)
            self._events.begin_arrival(request.arrival_time_s, is_idle=not self.has_unfinished_requests())
            if request.lora_name is None or self._adapter_gate is None or self._adapter_gate.admit(request):
                self._enter(request)
        except InvalidRequestError as error:
            self._refused[request_id] = error_output(request_id, error.message)
            if self._adapter_gate is not None:
                self._adapter_gate.release([request_id])
        else:
            self._request_ids.add(request_id)
            if self._transfers is not None:
                self._transfers.note(request)
            if self.recorder is not None:
                self.recorder.note_request(request)
        finally:
            self._events.end_arrival()

    def _check(self, request: EngineCoreRequest) -> None:
        has_adapters, can_transfer = self._adapter_gate is not None, self._transfers is not None
        check_request(request, self.ready, has_adapters=has_adapters, can_transfer=can_transfer)
        if self._transfers is not None:
            self._transfers.check(request)

    def _enter(self, request: EngineCoreRequest) -> None:
        if request.sampling_params.structured_outputs is None:
            self._schedule_request(request)
        else:
            self._grammar_gate.add(request)
            self._constrained_ids.add(request.request_id)

    def _schedule_request(self, request: EngineCoreRequest) -> None:
        if self._transfers is None or not self._transfers.hold(request):
            self._queue(request)

    def _queue(self, request: EngineCoreRequest) -> None:
        if request.sampling_params.use_beam_search:
            self._beam_searches.add(request)
        else:
            self._scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once; unknown ids are ignored, and no output follows."""
        named = dict.fromkeys(request_ids)  # keeps the caller's order, which a set would not
        for request_id in named:
            self._refused.pop(request_id, None)
        # Others are unknown to the caller: a refused id may be that of another's beam.
        ended = dict.fromkeys(request_id for request_id in named if request_id in self._request_ids)
        if self._constrained_ids:
            self._grammar_gate.abort(ended)
        self._forget(ended)
        aborted = list(ended)
        if self._beam_searches.request_id_to_search:
            aborted = self._beam_searches.abort(aborted)
        self._scheduler.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """True while a step could return outputs."""
        is_held = bool(self._refused or self._under_way or self._grammar_gate.waiting)
        is_loading = self._adapter_gate is not None and self._adapter_gate.is_busy
        is_arriving = self._transfers is not None and self._transfers.num_waiting > 0
        return is_held or is_loading or is_arriving or self._scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Computes one step of all running requests; under asynchronous scheduling, the outputs are of the last one."""
        gate = self._adapter_gate
        is_arriving = self._transfers is not None and self._transfers.num_waiting
        if self._grammar_gate.waiting or self._refused or is_arriving or (gate is not None and gate.is_busy):
            self._schedule_compiled()
            if not (self._under_way or self._scheduler.has_unfinished_requests()):
                return self._complete(
                    EngineCoreOutputs([], self._clock(), self.stats()._replace(num_scheduled_tokens=0))
                )
        start_s = self._events.received_s = self._clock()
        scheduled = self._scheduler.schedule(start_s)
        if self._events.scheduled_hooks:
            self._events.on_scheduled(scheduled)
        scheduled_s = self._clock()
        if self._constrained_ids or self._constrained_rows.num_known_tokens:
            pending = self._constrained_rows.execute(self._runner, scheduled)
        else:
            pending = self._runner.execute_model(scheduled)
        if self._num_steps_under_way == 1:
            step_outputs = self._update(scheduled, pending)
        else:
            step_outputs = self._update_oldest(scheduled, pending)
        phases = StepPhases(scheduled_s - start_s, self._executed_s - scheduled_s, self._clock() - self._executed_s)
        if self._events.step_hooks:
            stats = step_outputs.scheduler_stats or self._scheduler.stats()
            self._events.on_step(StepRecord(start_s, phases, stats, scheduled.scheduled_requests), step_outputs)
        return self._complete(step_outputs, phases)

    def _schedule_compiled(self) -> None:
        """Passes on the requests whose grammars are compiled; waits a moment where there is nothing else to do."""
        is_idle = not (self._refused or self._under_way or self._scheduler.has_unfinished_requests())
        wait_s = IDLE_WAIT_S if is_idle else 0.0
        ready = [
            (request, error, self._schedule_request) for request, error in self._grammar_gate.take_compiled(wait_s)
        ]
        if self._adapter_gate is not None:
            loaded = self._adapter_gate.take_ready(wait_s)
            ready += [(request, error, self._enter) for request, error in loaded]
        if self._transfers is not None:
            ready += [(request, None, self._queue) for request in self._transfers.take_ready(wait_s)]
        for request, error, go_on in ready:
            try:
                if error is not None:
                    raise error
                go_on(request)
            except InvalidRequestError as refusal:
                self._refused[request.request_id] = error_output(request.request_id, refusal.message)
                self._forget([request.request_id])

    def _update_oldest(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        """Applies the results of the oldest step under way, once there are as many as may be."""
        under_way = self._under_way
        under_way.append((scheduled, pending))
        self._executed_s = self._clock()
        if len(under_way) < self._num_steps_under_way and not scheduled.is_empty():
            return EngineCoreOutputs([], self._executed_s)
        step_outputs = self._update(*under_way.popleft())
        while under_way and under_way[0][0].is_empty():  # there is nothing to wait for
            others = self._update(*under_way.popleft()).outputs
            step_outputs = step_outputs._replace(outputs=[*step_outputs.outputs, *others])
        return step_outputs

    def _update(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        output = pending.result()
        self._executed_s = self._clock()
        step_outputs = self._scheduler.update_from_output(scheduled, output, self._executed_s)
        if self._transfers is not None:
            step_outputs = self._transfers.export(step_outputs)
        return self._beam_searches.update(step_outputs) if self._beam_searches.row_id_to_search else step_outputs

    def _complete(self, step_outputs: EngineCoreOutputs, phases: StepPhases | None = None) -> EngineCoreOutputs:
        refused, self._refused = self._refused, {}
        outputs, timestamp_s = [*refused.values(), *step_outputs.outputs], step_outputs.timestamp_s
        finished = [output.request_id for output in step_outputs.outputs if output.finish_reason is not None]
        if finished:
            self._forget(finished)
        if self.cache_news is not None and self.cache_news.is_followed:
            self.cache_news.read()
        if self._adapter_gate is not None:
            self._adapter_gate.end_step(is_idle=not self._under_way)
        events = self._events.take() if self._events.unsent else ()
        if not self._log_stats:
            return EngineCoreOutputs(outputs, timestamp_s)
        evictions = () if self._residency is None else self._residency.take()
        return EngineCoreOutputs(
            outputs, timestamp_s, step_outputs.scheduler_stats, events, phases, evictions=evictions,
            shadow=None if self._shadow is None else self._shadow.take_report(),
        )  # fmt: skip

    def now_s(self) -> float:
        """The time on the clock of the steps."""
        return self._clock()

    def take_shadow_report(self) -> ShadowReport | None:
        """The reports of the shadow scheduler since the last call; None if there are none."""
        return None if self._shadow is None else self._shadow.take_report()

    def _forget(self, request_ids: Collection[str]) -> None:
        self._request_ids.difference_update(request_ids)
        self._constrained_ids.difference_update(request_ids)
        if self._transfers is not None:
            self._transfers.forget(request_ids)
        if self._adapter_gate is not None:
            self._adapter_gate.release(request_ids)

    def load_adapter(self, identity: str, path: str) -> str:
        """Begins to read an adapter, or says how far that is; see `Control.LOAD_ADAPTER`."""
        return "Adapters are not enabled." if self._adapter_gate is None else self._adapter_gate.load(identity, path)

    def unload_adapter(self, identity: str) -> bool:
        """Drops an adapter when its last request has ended; whether it was known."""
        return self._adapter_gate is not None and self._adapter_gate.unload(identity)

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """The last steps after `after_step`; none without a recorder."""
        now_s = self._clock()
        return StepRecording(now_s, (), ()) if self.recorder is None else self.recorder.read(now_s, after_step)

    def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step; requests that wait for their grammars count as waiting."""
        stats, num_held = self._scheduler.stats(), len(self._grammar_gate.waiting)
        num_held += 0 if self._adapter_gate is None else len(self._adapter_gate.waiting)
        num_held += 0 if self._transfers is None else self._transfers.num_waiting
        return stats._replace(num_waiting=stats.num_waiting + num_held) if num_held else stats

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        has_forgotten = self._scheduler.reset_prefix_cache()
        if self.cache_news is not None:
            self.cache_news.read()
        return has_forgotten

    def sleep(self, level: int) -> bool:
        """Frees the KV storage, at level 2 the weights too; False while requests are running.

        Cached prefixes are forgotten. Requests are refused until `wake_up`.
        """
        if not self._settle() or not self.reset_prefix_cache():
            return False
        if level > self.sleep_level:
            self._runner.sleep(level)
            self.sleep_level = level
            if self._adapter_gate is not None and level > 1:
                self._adapter_gate.forget_all()
        return True

    def wake_up(self) -> bool:
        """Allocates and loads again what `sleep` freed; takes as long as that does."""
        if self.sleep_level:
            self._runner.wake_up()
            self.sleep_level = 0
        return True

    def _stop(self) -> bool:
        self.is_stopping = True
        return True

    def _settle(self) -> bool:
        """Computes the last, empty steps, which remove rows from the runner; True if no request is left."""
        while not self._request_ids and not self._refused and self.has_unfinished_requests():
            self.step()
        return not self.has_unfinished_requests()

    def shutdown(self) -> None:
        """Closes the log and releases the device. Idempotent."""
        if self._shadow is not None:
            self._shadow.close()
        if self.step_log is not None:
            self.step_log.close()
        if self.cache_news is not None:
            self.cache_news.close()
        if self._profiles is not None:
            self._profiles.stop()
        if self._adapter_gate is not None:
            self._adapter_gate.shutdown()
        if self._transfers is not None:
            self._transfers.shutdown()
        self._runner.shutdown()
