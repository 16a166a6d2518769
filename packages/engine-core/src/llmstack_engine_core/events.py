"""Tells hooks and the front end what happens in an engine core, and keeps the last of it for whoever looks later."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llmstack_engine_core.protocols import EventHook
from llmstack_types import (
    EngineCoreOutputs,
    RequestEvent,
    RequestStatus,
    SchedulerOutput,
    StepRecord,
    StepRecording,
)

logger = logging.getLogger(__name__)

# What the front end is told: a request that ends has an output that says so.
_TOLD_STATES = frozenset((RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED))


class EventBus:
    """Collects the states that requests enter, and calls the hooks. Used by the engine core's thread.

    `on_status` is what the scheduler calls; it reads the clock, which the scheduler may not.
    """

    def __init__(self, hooks: Sequence[EventHook], clock: Callable[[], float]) -> None:
        self._hooks = tuple(hooks)
        self._clock = clock
        self._untold: list[RequestEvent] = []

    @property
    def has_hooks(self) -> bool:
        """Whether anybody listens."""
        return bool(self._hooks)

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """A request enters a state."""
        event = RequestEvent(request_id, status, self._clock())
        if status in _TOLD_STATES:
            self._untold.append(event)
        for hook in self._hooks:
            self._call(hook.on_status, event)

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """A step is about to be computed."""
        for hook in self._hooks:
            self._call(hook.on_scheduled, scheduled)

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """A step is over."""
        for hook in self._hooks:
            self._call(hook.on_step, record, outputs)

    def take(self) -> list[RequestEvent]:
        """The events that the front end has not been told of."""
        untold, self._untold = self._untold, []
        return untold

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:  # a user's hook must not end the requests of all users
            logger.exception("an event hook failed")


class StepRecorder(EventHook):
    """Keeps the last steps and events, within bounds.

    Recording costs two appends: what a step's record holds is immutable and exists anyway.
    """

    def __init__(self, max_steps: int = 512, max_rows: int = 16_384, max_events: int = 4096) -> None:
        """`max_rows` bounds the rows of all steps together; the last step is kept whatever it has."""
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._num_rows = 0
        self._steps: deque[StepRecord] = deque()
        self._events: deque[RequestEvent] = deque(maxlen=max_events)

    def on_status(self, event: RequestEvent) -> None:
        """Keeps it."""
        self._events.append(event)

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Keeps it, and gives up the oldest ones over the bounds."""
        self._steps.append(record)
        self._num_rows += len(record.rows)
        while len(self._steps) > self._max_steps or (self._num_rows > self._max_rows and len(self._steps) > 1):
            self._num_rows -= len(self._steps.popleft().rows)

    def read(self, now_s: float, after_step: int = 0) -> StepRecording:
        """What is kept of the steps after `after_step`, and the last events."""
        steps = [record for record in self._steps if record.stats.step > after_step]
        return StepRecording(now_s, steps, list(self._events))


class StepLogger(EventHook):
    """One line of the log per step, at level DEBUG."""

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """What was in the batch, what it brought, and who waits."""
        logger.debug(
            "STEP %d: %d requests scheduled, %d tokens in the batch, %d sampled, %d finished, %d running, %d waiting",
            record.stats.step, len(record.rows), sum(row.num_scheduled_tokens for row in record.rows),
            sum(len(output.new_token_ids) for output in outputs.outputs),
            sum(output.finish_reason is not None for output in outputs.outputs),
            record.stats.num_running, record.stats.num_waiting,
        )  # fmt: skip
