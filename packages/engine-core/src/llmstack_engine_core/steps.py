"""Steps of an engine core: schedule, execute, update, several under way at once."""

from __future__ import annotations

from collections import deque

from llmstack_engine_core.events import EventBus
from llmstack_engine_core.protocols import ModelRunner, PendingOutput
from llmstack_engine_core.stages import Stages
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import EngineCoreOutputs, SchedulerOutput, SchedulerStats, StepPhases, StepRecord


class Steps:
    """Computes the steps of a scheduler by a model runner, and reports them to hooks.

    Attributes:
        under_way: Steps whose results have not been applied, the oldest first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        stages: Stages,
        events: EventBus,
        max_num_under_way: int,
    ) -> None:
        """`max_num_under_way` steps are started before the first of them has to have results."""
        self.under_way: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self._scheduler = scheduler
        self._runner = runner
        self._stages = stages
        self._events = events
        self._max_num_under_way = max_num_under_way
        self._executed_s = 0.0

    def compute(self) -> tuple[EngineCoreOutputs, StepPhases]:
        """Starts one step; returns the outputs of the step whose results are due, and the times of this call."""
        events = self._events
        clock = events.clock
        start_s = events.received_s = clock()
        scheduled = self._scheduler.schedule(start_s)
        if events.scheduled_hooks:
            events.on_scheduled(scheduled)
        scheduled_s = clock()
        if self._stages.active:
            pending = self._stages.execute(self._runner.execute_model, scheduled)
        else:
            pending = self._runner.execute_model(scheduled)
        if self._max_num_under_way == 1:
            step_outputs = self._update(scheduled, pending)
        else:
            step_outputs = self._update_oldest(scheduled, pending)
        phases = StepPhases(scheduled_s - start_s, self._executed_s - scheduled_s, clock() - self._executed_s)
        if events.step_hooks:
            stats = step_outputs.scheduler_stats or self._scheduler.stats()
            events.on_step(_record(start_s, phases, stats, scheduled), step_outputs)
        return step_outputs, phases

    def _update_oldest(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        """Applies the results of the oldest step under way, once there are as many as may be."""
        under_way = self.under_way
        under_way.append((scheduled, pending))
        self._executed_s = self._events.clock()
        if len(under_way) < self._max_num_under_way and not scheduled.is_empty():
            return EngineCoreOutputs([], self._executed_s)
        step_outputs = self._update(*under_way.popleft())
        while under_way and under_way[0][0].is_empty():  # there is nothing to wait for
            others = self._update(*under_way.popleft()).outputs
            step_outputs = step_outputs._replace(outputs=[*step_outputs.outputs, *others])
        return step_outputs

    def _update(self, scheduled: SchedulerOutput, pending: PendingOutput) -> EngineCoreOutputs:
        output = pending.result()
        self._executed_s = self._events.clock()
        step_outputs = self._scheduler.update_from_output(scheduled, output, self._executed_s)
        return self._stages.update(step_outputs) if self._stages.active else step_outputs


def _record(start_s: float, phases: StepPhases, stats: SchedulerStats, scheduled: SchedulerOutput) -> StepRecord:
    record = StepRecord(start_s, phases, stats, scheduled.scheduled_requests)
    if scheduled.encoder_work:
        record = record._replace(encoder_work=[part._replace(item=None) for part in scheduled.encoder_work])
    if scheduled.new_requests and any(request.media for request in scheduled.new_requests):
        media = {request.request_id: request.media for request in scheduled.new_requests if request.media}
        record = record._replace(media=media)
    return record
