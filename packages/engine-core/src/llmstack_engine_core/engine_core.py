"""The engine core: requests in; schedule, execute and update in each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import cast

from llmstack_engine_core.admission import check_request, error_output
from llmstack_engine_core.observers import Observers
from llmstack_engine_core.protocols import ModelRunner, UpdatingRunner, WatchedRunner
from llmstack_engine_core.stages import Operations, Stages
from llmstack_engine_core.steps import Steps
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    InvalidRequestError,
    Operation,
    SchedulerStats,
    StepPhases,
    StepRecording,
)
from llmstack_types.control import ArgumentTs, ResultT
from llmstack_types.errors import WeightsReloadedError
from llmstack_types.log_lines import set_log_level

# How long a step waits for a stage when there is nothing else to do; messages are read between two steps.
IDLE_WAIT_S = 0.005


class EngineCore:
    """A scheduler and a model runner in one loop. Used by one thread.

    A request passes the stages that it needs and no others, and then reaches the scheduler as it is.

    An exception from `step` ends the engine core: state of the scheduler and of the runner may differ from there on.

    Attributes:
        ready: The message about it for the front end.
        runner: The model runner; only the engine core's thread may use it.
        stages: What holds requests on their way to the scheduler.
        observers: What follows the steps.
        sleep_level: 0 while awake; 1 without KV storage, 2 without weights too.
        is_stopping: A client asked for the end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        ready: EngineReady,
        stages: Stages,
        observers: Observers,
        *,
        max_num_queued_requests: int = 65_536,
        num_steps_under_way: int = 1,
        ready_with: Callable[[str], EngineReady] | None = None,
    ) -> None:
        """Connects the parts.

        `scheduler` is the one that `stages` use, and reports states to the events of `observers`.
        `num_steps_under_way` steps are started before the first of them has to have results.
        `ready_with` makes the message about it with the weights of a folder, which the runner has by then.
        """
        self.ready = ready
        self.runner = runner
        self.stages = stages
        self.observers = observers
        self.sleep_level, self.is_stopping = 0, False
        self._scheduler, self._audits = scheduler, stages.audits
        self._events = observers.events
        self._max_num_queued_requests = max_num_queued_requests
        self._steps = Steps(scheduler, runner, stages, observers.events, num_steps_under_way)
        self._under_way = self._steps.under_way
        self._ready_with = ready_with
        self._request_ids: set[str] = set()
        self._refused: dict[str, EngineCoreOutput] = {}  # by request, until the next step
        self._operations: Operations = {
            Control.RESET_PREFIX_CACHE: self.reset_prefix_cache,
            Control.STATS: self.stats,
            Control.SHUTDOWN: self._stop,
            Control.RECENT_STEPS: self.recent_steps,
            Control.SLEEP: self.sleep,
            Control.WAKE_UP: self.wake_up,
            Control.SLEEP_LEVEL: lambda: self.sleep_level,
            Control.SET_LOG_LEVEL: set_log_level,
            Control.UPDATE_WEIGHTS: self.update_weights,
            Control.RELEASE_SESSIONS: self.release_sessions,
            **observers.operations(),
            **stages.operations(),
        }

    def call(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Does what a client asks for besides requests."""
        result: ResultT = self._operations[operation](*arguments)
        self.stages.look()  # a stage may have something to do now
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
            needed = self.stages.needed_by(request)
            for stage in needed:
                stage.check(request)
            check_request(request, self.ready)
            self._events.begin_arrival(request.arrival_time_s, is_idle=not self.has_unfinished_requests())
            if not (needed and self.stages.enter(request, needed)):
                self._scheduler.add_request(self.stages.stored.noted(request))
        except InvalidRequestError as error:
            self._refuse(request_id, error)
        else:
            self._request_ids.add(request_id)
            self.observers.note_request(request)
            self.stages.note_request(request)
        finally:
            self._events.end_arrival()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once; unknown ids are ignored, and no output follows."""
        named = dict.fromkeys(request_ids)  # keeps the caller's order, which a set would not
        for request_id in named:
            self._refused.pop(request_id, None)
        # Others are unknown to the caller: a refused id may be that of another's beam.
        aborted = [request_id for request_id in named if request_id in self._request_ids]
        self._request_ids.difference_update(aborted)
        if self.stages.active:
            aborted = self.stages.abort(aborted)
        self._scheduler.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """True while a step could return outputs."""
        if self._refused or self._under_way or (self.stages.active and self.stages.is_busy):
            return True
        return self._scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Computes one step of all running requests; under asynchronous scheduling, the outputs are of the last one."""
        if self._refused or (self.stages.active and self.stages.is_busy):
            self._pass_on()
            if not (self._under_way or self._scheduler.has_unfinished_requests()):
                return self._complete(
                    EngineCoreOutputs([], self._events.clock(), self.stats()._replace(num_scheduled_tokens=0))
                )
        return self._complete(*self._steps.compute())

    def work_when_idle(self) -> None:
        """Begins an audit or writes prefixes: what waits for a time without requests. Raises if the runner is lost."""
        _check_processes(self.runner)
        if not self.sleep_level:
            self._audits.begin()
            self.stages.stored.work_when_idle()
            self.stages.look()

    def _pass_on(self) -> None:
        """Lets requests go on that their stages hold no longer; waits a moment where there is nothing else to do."""
        is_idle = not (self._refused or self._under_way or self._scheduler.has_unfinished_requests())
        for request, error in self.stages.take_ready(IDLE_WAIT_S if is_idle else 0.0):
            try:
                if error is not None:
                    raise error
                if not self.stages.go_on(request):
                    self._scheduler.add_request(self.stages.stored.noted(request))
            except InvalidRequestError as refusal:
                self._refuse(request.request_id, refusal)

    def _refuse(self, request_id: str, error: InvalidRequestError) -> None:
        self._refused[request_id] = error_output(request_id, error.message)
        self._forget([request_id])

    def _complete(self, step_outputs: EngineCoreOutputs, phases: StepPhases | None = None) -> EngineCoreOutputs:
        refused, self._refused = self._refused, {}
        finished = [output.request_id for output in step_outputs.outputs if output.finish_reason is not None]
        if finished:
            self._forget(finished)
        if self.stages.active:
            self.stages.end_step(is_idle=not self._under_way)
        self.observers.note_returns(self._scheduler)
        if self._has_further_stats and step_outputs.scheduler_stats is not None:
            step_outputs = step_outputs._replace(scheduler_stats=self._with_stages(step_outputs.scheduler_stats))
        return self.observers.complete([*refused.values(), *step_outputs.outputs], step_outputs, phases)

    def _forget(self, request_ids: Collection[str]) -> None:
        self._request_ids.difference_update(request_ids)
        if self.stages.active:
            self.stages.forget(request_ids)

    def now_s(self) -> float:
        """The time on the clock of the steps."""
        return self._events.clock()

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """The last steps after `after_step`; none without a recorder."""
        return self.observers.recent_steps(self._events.clock(), after_step)

    def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step; requests that wait in a stage count as waiting."""
        stats, num_held = self._with_stages(self._scheduler.stats()), self.stages.num_waiting
        return stats._replace(num_waiting=stats.num_waiting + num_held) if num_held else stats

    def _with_stages(self, stats: SchedulerStats) -> SchedulerStats:
        return self.stages.stored.add_to(self._audits.add_to(stats))

    @property
    def _has_further_stats(self) -> bool:
        return self._audits.has_results or self.stages.stored.has_stats

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes in memory; False while requests are running."""
        self._audits.interrupt()
        has_forgotten = self._scheduler.reset_prefix_cache()
        self.observers.read_cache()
        return has_forgotten

    def release_sessions(self, tenant: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of a tenant that have a name; how many there were, and the tokens forgotten."""
        self._audits.interrupt()
        return self._scheduler.release_sessions(tenant, name)

    def sleep(self, level: int) -> bool:
        """Frees the KV storage, at level 2 the weights too; False while requests are running.

        Cached prefixes are forgotten. Requests are refused until `wake_up`.
        """
        self._audits.interrupt()
        if not self._settle() or not self.reset_prefix_cache():
            return False
        if level > self.sleep_level:
            self.runner.sleep(level)
            self.sleep_level = level
            if level > 1:
                self.stages.lose_weights()
        return True

    def wake_up(self) -> bool:
        """Allocates and loads again what `sleep` freed; takes as long as that does."""
        if self.sleep_level:
            self.runner.wake_up()
            self.sleep_level = 0
        return True

    def update_weights(self, path: str) -> tuple[str, str, str]:
        """Takes the weights of a folder: why not or nothing, their digest then, and the numeric contract id.

        Cached prefixes are forgotten, unless nothing has changed; those on disk are other ones from now on. An error of
        the model runner that is none of the weights ends the engine core.
        """
        self._audits.interrupt()
        if not hasattr(self.runner, "update_weights") or self._ready_with is None:
            return "this model runner does not change weights in place", "", ""
        if self.sleep_level:
            return "the engine sleeps", "", ""
        if not self._settle():
            return "requests are running", "", ""
        try:
            cast("UpdatingRunner", self.runner).update_weights(path)
        except ValueError as error:
            if isinstance(error, WeightsReloadedError):
                self.reset_prefix_cache()  # no request holds any of it
                self.stages.lose_weights()
            return " ".join(str(error).split()), "", ""
        self.ready = self._ready_with(path)
        self.reset_prefix_cache()
        self.stages.lose_weights()
        self.stages.follow_weights(self.ready)
        self.observers.follow_weights(self.ready)
        return "", self.ready.backends.get("weights", ""), self.ready.numeric_contract_id

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
        self.observers.close()
        for part in (*self.stages.all, self.runner):
            part.shutdown()


def _check_processes(runner: ModelRunner) -> None:
    """Finds out now what the next request would: a process of the runner has ended."""
    if hasattr(runner, "check_processes"):
        cast("WatchedRunner", runner).check_processes()
