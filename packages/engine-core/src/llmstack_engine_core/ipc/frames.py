"""The closed set of messages between a client and an engine core."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, Operation

PROTOCOL_VERSION = 9


class Tag(IntEnum):
    """The kind of a message; numbers are never reused."""

    HELLO = 1
    ADD_REQUEST = 2
    ABORT_REQUESTS = 3
    CONTROL_CALL = 4
    GOODBYE = 5
    FOLLOW_CACHE = 6
    READY = 16
    START_FAILED = 17
    OUTPUTS = 18
    CONTROL_RESULT = 19
    ENGINE_FAILED = 20
    SLEEP_CHANGED = 21
    CACHE_UPDATE = 22


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's first message; the answer is `EngineReady` or `StartFailed`."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A client's last message: its requests end."""


@dataclass(frozen=True, slots=True)
class FollowCache:
    """Asks for the content of the prefix cache: a whole `CacheUpdate`, then one for each change."""


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Ends requests of the sender."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """Asks for one operation of `Control`; the result has the same `call_id`."""

    call_id: int
    operation: Operation[Any, *tuple[Any, ...]]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The answer to a `ControlCall`; `value` has the result type of `operation`."""

    call_id: int
    operation: Operation[Any, *tuple[Any, ...]]
    value: Any


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine core could not start; one line for the user."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine core is about to end; one line for the user."""

    reason: str


ENGINE_STOPPED: Final = "the engine core has been stopped"
"""The reason of an `EngineFailed` that no crash explains: there will be no other engine core."""


@dataclass(frozen=True, slots=True)
class SleepChanged:
    """The engine core went to sleep at that level, or woke up: 0."""

    level: int


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Segments of prefixes that became findable or ceased to be.

    Attributes:
        number: One more than that of the engine core's update before.
        is_whole: Whether `added` is everything that is cached; else it is what came.
        added: The keys of `llmstack_kv_cache.segment_keys`, 8 bytes each.
        removed: The keys of those that went, before the others came.
    """

    number: int
    is_whole: bool
    added: bytes = b""
    removed: bytes = b""


ClientMessage = Hello | Goodbye | FollowCache | EngineCoreRequest | AbortRequests | ControlCall
EngineMessage = (
    EngineReady | StartFailed | EngineCoreOutputs | ControlResult | EngineFailed | SleepChanged | CacheUpdate
)
