"""Control operations of a fake engine."""

from __future__ import annotations

from typing import Any

from llmstack_types import Control, Operation


class FakeOperations:
    """Operations that are done unless requests, or a profile, are running.

    Attributes:
        operations: Names and arguments of those that `control` was asked for.
        sleep_level: The level set by `sleep`.
        is_profiling: Whether a profile is being recorded.
        num_running: Requests that are running.
    """

    num_running = 0

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.sleep_level = 0
        self.is_profiling = False

    async def control(self, operation: Operation[Any, *tuple[Any, ...]], *arguments: Any) -> Any:
        """Notes the operation; the result is that of an engine core."""
        self.operations.append((operation.name, *arguments))
        if operation == Control.START_PROFILE:
            was_profiling, self.is_profiling = self.is_profiling, True
            return "A profile is being recorded already." if was_profiling else ""
        if operation == Control.STOP_PROFILE:
            trace, self.is_profiling = "fake.pt.trace.json" * self.is_profiling, False
            return trace
        return operation != Control.RESET_PREFIX_CACHE or self.num_running == 0

    async def current_sleep_level(self) -> int:
        return self.sleep_level

    async def sleep(self, level: int) -> bool:
        """Sets the level; False while requests are running."""
        if self.num_running:
            return False
        self.sleep_level = max(level, self.sleep_level)
        return True

    async def wake_up(self) -> None:
        self.sleep_level = 0
