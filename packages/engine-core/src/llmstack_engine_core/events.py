"""Tells hooks and the front end what happens in an engine core, and keeps the last of it for whoever looks later."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llmstack_engine_core.protocols import EventHook
from llmstack_types import (
    EngineCoreOutputs,
    RequestEvent,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    StepPhases,
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


class _KeptStep(NamedTuple):
    """A `StepRecord` by columns; blocks and drafts by the index of their row, since few rows have any."""

    start_s: float
    phases: StepPhases
    stats: SchedulerStats
    request_ids: tuple[str, ...]
    num_computed_tokens: tuple[int, ...]
    num_scheduled_tokens: tuple[int, ...]
    new_block_ids: dict[int, list[int]]
    draft_token_ids: dict[int, Sequence[int]]

    @classmethod
    def of(cls, record: StepRecord) -> _KeptStep:
        """Takes a record apart."""
        request_ids, computed, scheduled, blocks, drafts = zip(*record.rows, strict=True) if record.rows else ((),) * 5
        return cls(
            record.start_s, record.phases, record.stats, request_ids, computed, scheduled,
            {index: ids for index, ids in enumerate(blocks) if ids} if any(blocks) else {},
            {index: ids for index, ids in enumerate(drafts) if ids} if any(drafts) else {},
        )  # fmt: skip

    def record(self) -> StepRecord:
        """Puts it together again."""
        rows = [
            ScheduledRequest(*row, self.new_block_ids.get(index, []), self.draft_token_ids.get(index, ()))
            for index, row in enumerate(zip(*self[3:6], strict=True))
        ]
        return StepRecord(self.start_s, self.phases, self.stats, rows)


class StepRecorder(EventHook):
    """Keeps the last steps and events, within bounds.

    A step is kept as a handful of tuples: hundreds of rows that outlive their step would occupy the garbage collector.
    """

    def __init__(self, max_steps: int = 512, max_rows: int = 16_384, max_events: int = 4096) -> None:
        """`max_rows` bounds the rows of all steps together; the last step is kept whatever it has."""
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._num_rows = 0
        self._steps: deque[_KeptStep] = deque()
        self._events: deque[RequestEvent] = deque(maxlen=max_events)

    def on_status(self, event: RequestEvent) -> None:
        """Keeps it."""
        self._events.append(event)

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Keeps it, and gives up the oldest ones over the bounds; a step without rows has nothing to show."""
        if not record.rows:
            return
        self._steps.append(_KeptStep.of(record))
        self._num_rows += len(record.rows)
        while len(self._steps) > self._max_steps or (self._num_rows > self._max_rows and len(self._steps) > 1):
            self._num_rows -= len(self._steps.popleft().request_ids)

    def read(self, now_s: float, after_step: int = 0) -> StepRecording:
        """What is kept of the steps after `after_step`, and the last events."""
        steps = [kept.record() for kept in self._steps if kept.stats.step > after_step]
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
