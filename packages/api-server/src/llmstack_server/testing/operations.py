"""Control operations of a fake engine."""

from __future__ import annotations

from typing import Any

from llmstack_types import Control, Operation, StepRecording
from llmstack_types.control import ArgumentTs, ResultT


class FakeOperations:
    """Operations that are done unless requests, or a profile, are running.

    Attributes:
        operations: Names and arguments of those that `control` was asked for.
        sleep_level: The level set by `sleep`.
        is_profiling: Whether a profile is being recorded.
        weights_problem: Why weights cannot be changed; empty where they can.
        num_running: Requests that are running.
        released: The sessions that a release finds, and the tokens that are forgotten.
        last_steps: The result of `recent_steps`.
    """

    num_running = 0
    released = (0, 0)

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.sleep_level = 0
        self.is_profiling = False
        self.weights_problem = ""
        self.last_steps = StepRecording(0.0, (), ())

    async def control(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Notes the operation; the result is that of an engine core."""
        self.operations.append((operation.name, *arguments))
        result: ResultT = self._result(operation)
        return result

    def _result(self, operation: Operation[Any, *tuple[Any, ...]]) -> Any:
        if operation == Control.START_PROFILE:
            was_profiling, self.is_profiling = self.is_profiling, True
            return "A profile is being recorded already." if was_profiling else ""
        if operation == Control.RELEASE_SESSIONS:
            return self.released
        if operation == Control.UPDATE_WEIGHTS:
            return self.weights_problem, "digest", "contract"
        if operation == Control.STOP_PROFILE:
            trace, self.is_profiling = "fake.pt.trace.json" * self.is_profiling, False
            return trace
        return operation != Control.RESET_PREFIX_CACHE or self.num_running == 0

    async def current_sleep_level(self) -> int:
        return self.sleep_level

    async def sleep(self, level: int = 1) -> bool:
        """Sets the level; False while requests are running."""
        if self.num_running:
            return False
        self.sleep_level = max(level, self.sleep_level)
        return True

    async def wake_up(self) -> None:
        self.sleep_level = 0

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """The step log after that step."""
        return self.last_steps._replace(steps=[one for one in self.last_steps.steps if one.stats.step > after_step])

    async def step_log(self, engine_index: int = 0) -> bytes:
        """The beginning of a log, where there are steps."""
        return b"llmsteps" if self.last_steps.steps else b""
