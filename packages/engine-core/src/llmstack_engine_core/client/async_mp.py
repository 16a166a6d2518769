"""An engine core in a process of its own, for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from llmstack_engine_core.client.mailbox import Mailbox
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.codec import encode
from llmstack_engine_core.ipc.frames import AbortRequests, ClientMessage, Hello, UtilityCall, UtilityOperation
from llmstack_engine_core.ipc.sockets import connect_client_socket, has_message
from llmstack_engine_core.launcher import launch_engine_process
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, EngineStartError, SchedulerStats

# A message on its way through ZeroMQ's thread when the process ends; it may carry the reason.
LAST_WORDS_S = 0.05
RESEND_S = 0.002


class AsyncMPClient:
    """Starts the process at once, also outside a running loop; the loop of the first call is the one that uses it.

    The loop itself watches the socket's descriptor: a round trip then takes a third less processor time here than over
    `zmq.asyncio` (100 against 145 microseconds, both loops), and a process that dies wakes everyone who waits.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._mailbox = Mailbox()
        self._process = launch_engine_process(config)
        self._context = zmq.Context()
        self._socket = connect_client_socket(self._context, self._process.directory, client_index=0)
        self._socket.send(encode(Hello()), zmq.NOBLOCK)
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_dead(self) -> bool:
        """True once the engine core is gone."""
        return self._mailbox.death is not None

    @property
    def pid(self) -> int:
        """Of the engine core's process."""
        return self._process.pid

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the engine core's first message, `start_timeout_s` at most.

        Raises:
            EngineStartError: It could not start; the text says why. The process is gone.
        """
        try:
            try:
                await asyncio.wait_for(self._wait_for(self._mailbox.is_start_over), self._config.start_timeout_s)
            except TimeoutError:
                limit_s = self._config.start_timeout_s
                raise EngineStartError(f"the engine core was not ready within {limit_s:g} s") from None
            return self._mailbox.take_ready()
        except EngineStartError:
            await self.shutdown()
            raise

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request.

        Raises:
            EngineDeadError: The engine core is gone.
            InvalidRequestError: The id is in use.
            CodecError: A value is outside what the protocol can carry.
        """
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
        if outputs:
            return outputs.popleft()
        self._mailbox.check_alive()
        return EngineCoreOutputs([])

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return await self._call(UtilityOperation.RESET_PREFIX_CACHE) is True

    async def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step; also shows that the loop turns."""
        value = await self._call(UtilityOperation.STATS)
        return value if isinstance(value, SchedulerStats) else SchedulerStats()

    async def shutdown(self) -> None:
        """Stops the engine core and removes every process, socket and file of it. Idempotent."""
        if self._socket.closed:
            return
        self._attach()
        self._mailbox.set_dead("the engine core has been shut down")
        self._process.terminate()
        try:
            await asyncio.wait_for(self._wait_for(lambda: not self._process.is_alive), self._process.grace_s)
        except TimeoutError:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        if self._socket.closed:  # two shutdowns at once
            return
        self._detach()
        self._process.stop()
        self._socket.close()
        self._context.term()
        self._wake()

    async def _call(self, operation: UtilityOperation) -> bool | SchedulerStats:
        self._mailbox.check_alive()
        call_id = self._mailbox.next_call_id()
        await self._send(UtilityCall(call_id, operation))
        await self._wait_for(lambda: call_id in self._mailbox.results or self._mailbox.death is not None)
        if call_id not in self._mailbox.results:
            self._mailbox.check_alive()
        return self._mailbox.results.pop(call_id)

    async def _send(self, message: ClientMessage) -> None:
        self._attach()
        frame = encode(message)
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:  # the engine core is in a long step and thousands of messages wait
                await asyncio.sleep(RESEND_S)
                self._mailbox.check_alive()
            else:
                # The descriptor is edge-triggered, and a send may have swallowed the edge of a message that came.
                self._on_readable()
                return

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

    def _attach(self) -> None:
        if self._loop is None and not self._socket.closed:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket_fd, self._on_readable)
            self._loop.add_reader(self._process.death_fd, self._on_death)
            self._on_readable()

    def _detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket_fd)
            self._loop.remove_reader(self._process.death_fd)

    def _on_readable(self) -> None:
        if self._socket.closed:
            return
        has_news = False
        while has_message(self._socket):
            self._mailbox.put(self._socket.recv())
            has_news = True
        if has_news:
            self._wake()

    def _on_death(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.death_fd)
        loop.call_later(LAST_WORDS_S, self._declare_dead)

    def _declare_dead(self) -> None:
        self._on_readable()
        self._mailbox.set_dead(f"the engine core's process has ended: {self._process.describe_end()}")
        self._wake()
