"""Steps of a scheduler without a model; the caller knows tokens and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    LLMStackError,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)

MAX_IDLE_STEPS: Final = 1000
"""Steps with nothing to compute, one after the other; a scheduler that needs more of them will never have any."""

Sample = Callable[[Sequence[ScheduledRequest]], list[list[int]]]
"""The new tokens of each row, in the place of a model; none for a chunk of a prompt."""
StepTime = Callable[[Sequence[ScheduledRequest]], float]
"""The seconds of a step with these rows."""


class NoProgressError(LLMStackError, ValueError):
    """The scheduler has requests and schedules none of them; the text says when."""


class SchedulerDriver:
    """Steps one scheduler, on a clock that its caller moves, or on one of its own.

    Pure: it has no clock of the system and no randomness, so equal calls give equal steps.

    Attributes:
        scheduler: For what takes no step; requests may be aborted there, and prefixes imported.
        now_s: The time of the last call that has one; `step` begins then. Its caller may move it.
        num_steps: The number of the last step scheduled.
        under_way: The steps that are not updated, by number.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        now_s: float = 0.0,
        num_steps: int = 0,
        under_way: Mapping[int, SchedulerOutput] | None = None,
    ) -> None:
        """`num_steps` and `under_way`: Where a scheduler goes on that has taken steps before."""
        self.scheduler = scheduler
        self.now_s = now_s
        self.num_steps = num_steps
        self.under_way: dict[int, SchedulerOutput] = dict(under_way or {})
        self._num_idle_steps = 0

    def add(self, request: EngineCoreRequest) -> bool:
        """Queues a request; False if the scheduler refuses it."""
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            return False
        return True

    def fork(self, parent_id: str, child: EngineCoreRequest) -> int | None:
        """Forks a running request; how many of its tokens need not be computed, or None if the scheduler refuses it."""
        try:
            return self.scheduler.fork_request(parent_id, child)
        except InvalidRequestError:
            return None

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Begins the next step at `now_s`."""
        self.now_s = now_s
        scheduled = self.scheduler.schedule(now_s)
        self.num_steps = scheduled.step
        self.under_way[scheduled.step] = scheduled
        return scheduled

    def update(
        self, step: int, sampled_token_ids: list[list[int]], now_s: float, errors: Mapping[str, str] | None = None
    ) -> EngineCoreOutputs:
        """Ends a step under way at `now_s`. `errors`: By request id, of rows that have failed.

        Raises:
            KeyError: It is not under way.
            ValueError: There are not as many lists of tokens as rows, or another step has to end before.
        """
        self.now_s = now_s
        scheduled = self.under_way.pop(step)
        request_ids = [row.request_id for row in scheduled.scheduled_requests]
        output = ModelRunnerOutput(request_ids, sampled_token_ids, errors=errors or {})
        return self.scheduler.update_from_output(scheduled, output, now_s)

    def step(self, sample: Sample, step_s: StepTime) -> tuple[SchedulerOutput, EngineCoreOutputs]:
        """Computes one step on the driver's own clock, which goes on by `step_s`; one without rows takes no time.

        Raises:
            NoProgressError: It is the last of more than `MAX_IDLE_STEPS` steps with nothing to compute.
        """
        scheduled = self.schedule(self.now_s)
        rows = scheduled.scheduled_requests
        sampled = sample(rows)
        outputs = self.update(scheduled.step, sampled, self.now_s + step_s(rows) if rows else self.now_s)
        self._num_idle_steps = self._num_idle_steps + 1 if scheduled.is_empty() else 0
        if self._num_idle_steps > MAX_IDLE_STEPS:
            raise NoProgressError(f"the scheduler makes no progress at {self.now_s:.3f} s")
        return scheduled, outputs
