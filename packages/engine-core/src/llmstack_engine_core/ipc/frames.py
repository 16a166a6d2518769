"""The closed set of messages between a client and an engine core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, SchedulerStats, StepRecording

PROTOCOL_VERSION = 1


class Tag(IntEnum):
    """The kind of a message; numbers are never reused."""

    HELLO = 1
    ADD_REQUEST = 2
    ABORT_REQUESTS = 3
    UTILITY_CALL = 4
    GOODBYE = 5
    READY = 16
    START_FAILED = 17
    OUTPUTS = 18
    UTILITY_RESULT = 19
    ENGINE_FAILED = 20
    SLEEP_CHANGED = 21


class UtilityOperation(IntEnum):
    """What a client may ask of an engine core besides requests; there is no call by name."""

    RESET_PREFIX_CACHE = 1
    STATS = 2
    SHUTDOWN = 3
    RECENT_STEPS = 4
    SLEEP = 5
    WAKE_UP = 6


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first message; the answer is `EngineReady` or `StartFailed`."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A client's last message: its requests end."""


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Ends requests of the sender."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """Asks for one operation; `call_id` comes back with the result.

    Attributes:
        argument: What it means depends on the operation.
    """

    call_id: int
    operation: UtilityOperation
    argument: int = 0


@dataclass(frozen=True, slots=True)
class UtilityResult:
    """The answer to a `UtilityCall`; the value's type depends on the operation."""

    call_id: int
    value: bool | SchedulerStats | StepRecording


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine core could not start; one line for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine core is about to end; one line for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class SleepChanged:
    """The engine core went to sleep at that level, or woke up: 0."""

    level: int


ClientMessage = Hello | Goodbye | EngineCoreRequest | AbortRequests | UtilityCall
EngineMessage = EngineReady | StartFailed | EngineCoreOutputs | UtilityResult | EngineFailed | SleepChanged
