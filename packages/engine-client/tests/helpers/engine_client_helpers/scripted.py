"""An engine core that says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import ClientMessage
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SamplingParams,
)

READY = EngineReady(64, 16, 128, 257, "float32", "cpu", backends={"linear": "avx512"}, numeric_contract_id="a")
OTHER = replace(READY, backends={"linear": "avx2"}, numeric_contract_id="b")


class Engine(AsyncClient):
    """A client whose engine core is the test."""

    def __init__(self, ready: EngineReady | None = READY) -> None:
        super().__init__(start_timeout_s=60.0)
        self.sent: list[ClientMessage] = []
        self.is_up = False
        if ready is not None:
            self.deliver(ready)

    async def wait_until_ready(self) -> EngineReady:
        ready = await super().wait_until_ready()
        self.is_up = True
        return ready

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


class SpokenTo:
    """A client that is asked and read, with what its requests have got.

    Attributes:
        client: The client, which the subclass makes.
        tokens: Tokens of each request.
        ends: The error of each request that has ended, or None.
    """

    client: Any

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str | None] = {}

    async def add(self, *request_ids: str, fork_of: str = "", **fields: Any) -> None:
        """Sends requests of eight tokens, one after the other."""
        for request_id in request_ids:
            params = SamplingParams(max_tokens=8, seed=0, **fields)
            await self.client.add_request(EngineCoreRequest(request_id, [5, 6, 7], params, fork_of=fork_of))

    async def read_until(self, is_done: Callable[[], bool]) -> None:
        """Reads outputs until that is so; a minute at most."""
        async with asyncio.timeout(60):
            while not is_done():
                reading = asyncio.ensure_future(self.client.get_outputs())
                while not reading.done() and not is_done():  # noqa: ASYNC110  # there is no event to wait for
                    await asyncio.sleep(0)
                if not reading.done():
                    reading.cancel()
                    return
                for output in reading.result().outputs:
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.ends[output.request_id] = output.error
