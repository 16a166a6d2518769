"""State of a client: requests in flight, messages received, engine core's end.

It does no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from llmstack_engine_core.messages.control import ControlResult
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import (
    ENGINE_MESSAGES,
    CacheUpdate,
    EngineFailed,
    EngineMessage,
    SleepChanged,
    StartFailed,
)
from llmstack_types import (
    Control,
    EngineCoreOutputs,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    InvalidRequestError,
    Operation,
)

MAX_CACHE_UPDATES: Final = 1024


class Mailbox:
    """Sorts what an engine core sends; no I/O.

    Attributes:
        ready: The engine core's first message, once it came, with the weights that it has now.
        start_failure: Why it could not start.
        death: Why it is gone.
        outputs: Outputs that have not been read yet.
        results: Call id to the answer that has not been read yet.
        num_stale: Messages of other engine cores than the one that answered first; none of them is taken.
        sleep_level: The engine core's; 0 while it is awake.
        cache_updates: Unread updates of the cache; over a limit the oldest are dropped, and a number is missing.
    """

    def __init__(self) -> None:
        self.ready: EngineReady | None = None
        self.start_failure: str | None = None
        self.death: str | None = None
        self.outputs: deque[EngineCoreOutputs] = deque()
        self.results: dict[int, object] = {}
        self.sleep_level = 0
        self.num_stale = 0
        self._epoch: int | None = None
        self.cache_updates: deque[CacheUpdate] = deque(maxlen=MAX_CACHE_UPDATES)
        self._request_ids: set[str] = set()
        self._num_calls = 0
        self._calls: dict[int, Operation[Any, *tuple[object, ...]]] = {}

    def put(self, frame: bytes) -> None:
        """Takes one frame; one that is no message counts as the engine core's end, since nothing can be relied on."""
        try:
            epoch, message = ENGINE_MESSAGES.decode(frame)
        except CodecError as error:
            self.set_dead(f"the engine core sent what is no message: {error}")
            return
        if self._epoch is None:
            self._epoch = epoch
        elif epoch != self._epoch:  # of an engine core that was given up, or of the one after this
            self.num_stale += 1
            return
        self.take(message)

    def take(self, message: EngineMessage) -> None:
        """Sorts one message in."""
        match message:
            case EngineCoreOutputs():
                self._request_ids.difference_update(
                    [output.request_id for output in message.outputs if output.finish_reason is not None]
                )
                self.outputs.append(message)
            case ControlResult():
                self._take_result(message)
            case EngineReady():
                self.ready = message
            case StartFailed():
                self.start_failure = message.reason
                self.set_dead(message.reason)
            case EngineFailed():
                self.set_dead(message.reason)
            case SleepChanged():
                self.sleep_level = message.level
            case CacheUpdate():
                self.cache_updates.append(message)

    def _take_result(self, result: ControlResult) -> None:
        if result.operation is Control.UPDATE_WEIGHTS:
            self._follow_weights(*result.value)
        operation = self._calls.get(result.call_id)
        if operation is None:  # its caller was cancelled
            return
        if operation != result.operation:
            self.set_dead(f"the engine core answered {operation.name} with a result of {result.operation.name}")
            return
        self.results[result.call_id] = result.value

    def _follow_weights(self, problem: str, digest: str, contract_id: str) -> None:
        if self.ready is not None and not problem:
            backends = {**self.ready.backends, "weights": digest}
            self.ready = replace(self.ready, backends=backends, numeric_contract_id=contract_id)

    def set_dead(self, reason: str) -> None:
        """Remembers the first reason."""
        if self.death is None:
            self.death = reason

    def check_alive(self) -> None:
        """Raises `EngineDeadError` once the engine core is gone."""
        if self.death is not None:
            raise EngineDeadError(self.death)

    def is_start_over(self) -> bool:
        """True when `take_ready` has an answer."""
        return self.ready is not None or self.death is not None

    def take_ready(self) -> EngineReady:
        """The engine core's first message.

        Raises:
            EngineStartError: There will be none.
            EngineDeadError: It came, but the engine core has ended since.
        """
        if self.ready is None:
            raise EngineStartError(self.start_failure or self.death or "the engine core is not ready")
        self.check_alive()
        return self.ready

    @property
    def num_requests(self) -> int:
        """The number of requests in flight."""
        return len(self._request_ids)

    def register(self, request_id: str) -> None:
        """Notes a request in flight.

        Raises:
            InvalidRequestError: The id is in use.
        """
        if request_id in self._request_ids:
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        self._request_ids.add(request_id)

    def forget(self, request_ids: Sequence[str]) -> list[str]:
        """Drops requests; those that were in flight."""
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._request_ids]
        self._request_ids.difference_update(known)
        return known

    def begin_call(self, operation: Operation[Any, *tuple[object, ...]]) -> int:
        """A number that no earlier call had; its result is kept until `end_call`."""
        self._num_calls += 1
        self._calls[self._num_calls] = operation
        return self._num_calls

    def is_call_over(self, call_id: int) -> bool:
        """True when `result_of` has an answer."""
        return call_id in self.results or self.death is not None

    def result_of(self, call_id: int) -> Any:
        """The call's result.

        Raises:
            EngineDeadError: There will be none.
        """
        if call_id not in self.results:
            self.check_alive()
        return self.results[call_id]

    def end_call(self, call_id: int) -> None:
        """Forgets a call and its result."""
        self._calls.pop(call_id, None)
        self.results.pop(call_id, None)
