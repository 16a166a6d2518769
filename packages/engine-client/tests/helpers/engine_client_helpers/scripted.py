"""An engine core that says what the test tells it to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import ClientMessage
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineReady, FinishReason

READY = EngineReady(64, 16, 128, 257, "float32", "cpu", backends={"linear": "avx512"}, numeric_contract_id="a")
OTHER = replace(READY, backends={"linear": "avx2"}, numeric_contract_id="b")


class Engine(AsyncClient):
    """A client whose engine core is the test."""

    def __init__(self, ready: EngineReady | None = READY) -> None:
        super().__init__(start_timeout_s=60.0)
        self.sent: list[ClientMessage] = []
        if ready is not None:
            self.deliver(ready)

    def deliver(self, message: Any) -> None:
        self._mailbox.take(message)
        self._wake()

    def say(self, request_id: str, *token_ids: int, is_end: bool = False) -> None:
        reason = FinishReason.LENGTH if is_end else None
        self.deliver(EngineCoreOutputs([EngineCoreOutput(request_id, list(token_ids), finish_reason=reason)], 1.0))

    def die(self) -> None:
        self._mailbox.set_dead("it was killed")
        self._wake()

    @property
    def requests(self) -> dict[str, EngineCoreRequest]:
        return {one.request_id: one for one in self.sent if isinstance(one, EngineCoreRequest)}

    async def shutdown(self) -> None:
        self.die()

    async def _send(self, message: ClientMessage) -> None:
        self.sent.append(message)
        if isinstance(message, ControlCall):
            self.deliver(ControlResult(message.call_id, message.operation, True))

    def _attach(self) -> None:
        """Everything arrives through `deliver`."""
