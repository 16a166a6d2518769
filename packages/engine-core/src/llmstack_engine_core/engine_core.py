"""The engine core: requests in, and with each step schedule, execute, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from llmstack_engine_core.block_residency import BlockResidency
from llmstack_engine_core.events import EventBus, StepRecorder
from llmstack_engine_core.protocols import ModelRunner, PendingOutput, Scheduler
from llmstack_engine_core.step_log import StepLog
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    InvalidRequestError,
    PoolingTask,
    SchedulerOutput,
    SchedulerStats,
    StepPhases,
    StepRecord,
    StepRecording,
)


class EngineCore:
    """A scheduler and a model runner in one loop. Used by one thread.

    An exception from `step` ends the engine core: state of the scheduler and of the runner may differ from there on.

    Attributes:
        ready: What the front end is told about it.
        step_log: The log that `scheduler` keeps, if it does; closed at shutdown.
        recorder: What keeps the last steps, if anything does.
        sleep_level: 0 while awake; 1 without KV storage, 2 without weights too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        ready: EngineReady,
        *,
        log_stats: bool = True,
        max_num_queued_requests: int = 65_536,
        step_log: StepLog | None = None,
        async_scheduling: bool = False,
        events: EventBus | None = None,
        recorder: StepRecorder | None = None,
        residency: BlockResidency | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`events` is what the scheduler tells of states; `recorder` and `residency` are among its hooks."""
        self.ready = ready
        self.step_log = step_log
        self.recorder = recorder
        self.sleep_level = 0
        self._scheduler = scheduler
        self._runner = runner
        self._log_stats = log_stats
        self._max_num_queued_requests = max_num_queued_requests
        self._async_scheduling = async_scheduling
        self._under_way: tuple[SchedulerOutput, PendingOutput] | None = None
        self._events = events if events is not None else EventBus((), clock)
        self._clock = clock
        self._residency = residency
        self._executed_s = 0.0
        self._request_ids: set[str] = set()
        self._refused: list[EngineCoreOutput] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request; one that cannot be served gets an output with `FinishReason.ERROR` in the next step.

        Raises:
            InvalidRequestError: The id is in use: there is no output, since it would end the other request. Or the
                engine core is asleep: no step follows that could bring one.
        """
        request_id = request.request_id
        if self.sleep_level:
            raise InvalidRequestError("The engine core is asleep.")
        if request_id in self._request_ids:
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        try:
            self._check(request)
            self._scheduler.add_request(request)
        except InvalidRequestError as error:
            self._refused.append(error_output(request_id, error.message))
        else:
            self._request_ids.add(request_id)

    def _check(self, request: EngineCoreRequest) -> None:
        if len(self._request_ids) >= self._max_num_queued_requests:
            raise InvalidRequestError(f"The engine core holds {self._max_num_queued_requests} requests already.")
        if request.pooling_params is None and not self.ready.is_generative:
            raise InvalidRequestError("The model only pools.", param="model")
        if request.pooling_params is not None and not self.ready.embedding_size:
            raise InvalidRequestError("The model runner does not pool.", param="model")
        if _asks_for_labels(request) and not self.ready.num_labels:
            raise InvalidRequestError("The model has no labels.", param="model")
        params = request.sampling_params
        for name, token_ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("output_token_ids", request.output_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.ready.vocab_size):
                raise InvalidRequestError(f"A token id in {name} is out of vocabulary.", param=name)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once; unknown ids are ignored, and no output follows."""
        ended = dict.fromkeys(request_ids)  # keeps the caller's order, which a set would not
        self._request_ids.difference_update(ended)
        self._refused = [output for output in self._refused if output.request_id not in ended]
        self._scheduler.abort_requests(ended)

    def has_unfinished_requests(self) -> bool:
        """True while a step could bring something."""
        return bool(self._refused or self._under_way) or self._scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Computes one step of all running requests; under asynchronous scheduling, the outputs are of the last one."""
        start_s = self._clock()
        scheduled = self._scheduler.schedule(start_s)
        self._events.on_scheduled(scheduled)
        scheduled_s = self._clock()
        pending = self._runner.execute_model(scheduled)
        step_outputs = self._land_due(scheduled, pending)
        phases = StepPhases(scheduled_s - start_s, self._executed_s - scheduled_s, self._clock() - self._executed_s)
        self._record(start_s, phases, step_outputs, scheduled)
        return self._complete(step_outputs, phases)

    def _land_due(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        """Takes over the step's results, or under asynchronous scheduling those of the one before."""
        if not self._async_scheduling:
            return self._land(scheduled, pending)
        landing, self._under_way = self._under_way, (scheduled, pending)
        self._executed_s = self._clock()
        step_outputs = EngineCoreOutputs([], self._executed_s) if landing is None else self._land(*landing)
        if scheduled.is_empty():  # there is nothing to wait for
            self._under_way = None
            refused = self._land(scheduled, pending).outputs
            return replace(step_outputs, outputs=[*step_outputs.outputs, *refused])
        return step_outputs

    def _land(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        output = pending.result()
        self._executed_s = self._clock()
        return self._scheduler.update_from_output(scheduled, output, self._executed_s)

    def _record(
        self, start_s: float, phases: StepPhases, step_outputs: EngineCoreOutputs, scheduled: SchedulerOutput
    ) -> None:
        if self._events.has_hooks:
            stats = step_outputs.scheduler_stats
            stats = self._scheduler.stats() if stats is None else stats
            self._events.on_step(StepRecord(start_s, phases, stats, scheduled.scheduled_requests), step_outputs)

    def _complete(self, step_outputs: EngineCoreOutputs, phases: StepPhases) -> EngineCoreOutputs:
        refused, self._refused = self._refused, []
        self._request_ids.difference_update(
            [output.request_id for output in step_outputs.outputs if output.finish_reason is not None]
        )
        outputs, timestamp_s = [*refused, *step_outputs.outputs], step_outputs.timestamp_s
        events = self._events.take()
        if not self._log_stats:
            return EngineCoreOutputs(outputs, timestamp_s)
        evictions = () if self._residency is None else self._residency.take()
        return EngineCoreOutputs(
            outputs, timestamp_s, step_outputs.scheduler_stats, events, phases, evictions=evictions
        )

    def recent_steps(self, after_step: int = 0) -> StepRecording:
        """What the recorder has of the steps after `after_step`; nothing without one."""
        now_s = self._clock()
        return StepRecording(now_s, (), ()) if self.recorder is None else self.recorder.read(now_s, after_step)

    def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._scheduler.reset_prefix_cache()

    def sleep(self, level: int) -> bool:
        """Gives the KV storage back, and with level 2 the weights too; False while requests are running.

        Cached prefixes are forgotten. Requests are refused until `wake_up`.
        """
        if not self._settle() or not self._scheduler.reset_prefix_cache():
            return False
        if level > self.sleep_level:
            self._runner.sleep(level)
            self.sleep_level = level
        return True

    def wake_up(self) -> None:
        """Allocates and loads again what `sleep` gave back; takes as long as that does."""
        if self.sleep_level:
            self._runner.wake_up()
            self.sleep_level = 0

    def _settle(self) -> bool:
        """Whether no request is left, once the runner has been told of those that ended."""
        while not self._request_ids and not self._refused and self.has_unfinished_requests():
            self.step()
        return not self.has_unfinished_requests()

    def shutdown(self) -> None:
        """Closes the log and releases the device. Idempotent."""
        if self.step_log is not None:
            self.step_log.close()
        self._runner.shutdown()


def error_output(request_id: str, error: str) -> EngineCoreOutput:
    """An output that ends one request with an error."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)


def _asks_for_labels(request: EngineCoreRequest) -> bool:
    return request.pooling_params is not None and request.pooling_params.task is PoolingTask.CLASSIFY
