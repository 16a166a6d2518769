"""Base class of the clients for an event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from llmstack_engine_client.clients.mailbox import Mailbox
from llmstack_engine_core.messages.control import ControlCall
from llmstack_engine_core.messages.protocol import (
    ENGINE_STOPPED,
    AbortRequests,
    CacheUpdate,
    ClientMessage,
    FollowCache,
)
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    EngineStartError,
    Operation,
)
from llmstack_types.control import ArgumentTs, ResultT
from llmstack_types.lifecycle import AsyncClosing


class AsyncClient(AsyncClosing, ABC):
    """One engine core, used by one event loop: that of the first call.

    Attributes:
        contract_id: Empty: requests of a lost engine core are moved by a `RecoveringClient`.
        num_unmoved_requests, num_finishing, is_exchanging: As of an engine core that is alone, and is not exchanged.
    """

    contract_id = ""
    num_unmoved_requests = num_finishing = 0
    is_exchanging = False

    def __init__(self, start_timeout_s: float) -> None:
        """`start_timeout_s`: How long to wait for the engine core to become ready."""
        self._start_timeout_s = start_timeout_s
        self._mailbox = Mailbox()
        self._waiters: set[asyncio.Future[None]] = set()
        self._on_news: Callable[[], None] | None = None

    @property
    def is_dead(self) -> bool:
        """True once the engine core is gone."""
        return self._mailbox.death is not None

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether the engine core, which is gone, was asked to end: no request of it is the cause."""
        return self._mailbox.death == ENGINE_STOPPED

    @property
    def is_recovering(self) -> bool:
        """An engine core that dies is not replaced."""
        return False

    @property
    def num_restarts(self) -> int:
        """Always 0: an engine core that ends is not replaced."""
        return 0

    @property
    def engines(self) -> list[EngineReady]:
        """The `EngineReady` of the engine core; empty until it is ready."""
        return [] if self._mailbox.ready is None else [self._mailbox.ready]

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake, by its last message."""
        return self._mailbox.sleep_level

    @property
    def num_requests(self) -> int:
        """Requests of this client in flight."""
        return self._mailbox.num_requests

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the engine core's first message, `start_timeout_s` at most.

        Raises:
            EngineStartError: It could not start; the text says why. The client is shut down.
        """
        try:
            try:
                await asyncio.wait_for(self._wait_for(self._mailbox.is_start_over), self._start_timeout_s)
            except TimeoutError:
                raise EngineStartError(f"the engine core was not ready within {self._start_timeout_s:g} s") from None
            return self._mailbox.take_ready()
        except EngineStartError:
            await self.shutdown()
            raise

    async def wait_until_dead(self) -> str:
        """Returns when the engine core is gone, with the reason."""
        await self._wait_for(lambda: self._mailbox.death is not None)
        return self._mailbox.death or ""

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request.

        Raises:
            EngineDeadError: The engine core is gone.
            InvalidRequestError: The id is in use.
            CodecError: A value is outside what the protocol can carry.
        """
        if self._mailbox.death is not None:
            self._mailbox.check_alive()
        self._mailbox.register(request.request_id)
        try:
            await self._send(request)
        except ValueError:
            self._mailbox.forget([request.request_id])
            raise

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; no output follows the engine core's receipt. Does nothing once the engine core is gone."""
        known = self._mailbox.forget(request_ids)
        if known and self._mailbox.death is None:
            await self._send(AbortRequests(tuple(known)))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        outputs = self._mailbox.outputs
        if not outputs:
            await self._wait_for(lambda: bool(outputs) or self._mailbox.death is not None)
        return self.get_outputs_nowait() or EngineCoreOutputs([])

    def get_outputs_nowait(self) -> EngineCoreOutputs | None:
        """Outputs that have come, or None.

        Raises:
            EngineDeadError: There are none, and the engine core is gone.
        """
        if self._mailbox.outputs:
            return self._mailbox.outputs.popleft()
        if self._mailbox.death is not None:
            self._mailbox.check_alive()
        return None

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls `on_news` whenever something has come, and when the engine core is gone."""
        self._on_news = on_news
        self._attach()

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Asks the engine core for something besides requests; see `Control`.

        `engine_index`: Which engine core, where there are several; None asks all.

        Raises:
            EngineDeadError: The engine core is gone, or ended without an answer.
            CodecError: An argument is outside what the protocol can carry.
        """
        mailbox = self._mailbox
        mailbox.check_alive()
        call_id = mailbox.begin_call(operation)
        try:
            await self._send(ControlCall(call_id, operation, arguments))
            await self._wait_for(lambda: mailbox.is_call_over(call_id))
            result: ResultT = mailbox.result_of(call_id)
            return result
        finally:
            mailbox.end_call(call_id)

    async def follow_cache(self) -> None:
        """Asks for the content of the prefix cache and for every change of it: `take_cache_updates`.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        self._mailbox.check_alive()
        await self._send(FollowCache())

    def take_cache_updates(self) -> list[CacheUpdate]:
        """The updates of caches since the last call."""
        updates = list(self._mailbox.cache_updates)
        self._mailbox.cache_updates.clear()
        return updates

    @abstractmethod
    async def _send(self, message: ClientMessage) -> None:
        """Sends one message; raises EngineDeadError where there is no way left."""

    @abstractmethod
    def _attach(self) -> None:
        """Begins to receive, on the running loop. Idempotent."""

    async def _wait_for(self, is_done: Callable[[], bool]) -> None:
        self._attach()
        while not is_done():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._on_news is not None:
            self._on_news()
