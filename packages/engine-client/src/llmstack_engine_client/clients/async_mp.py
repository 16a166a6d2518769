"""Clients of an engine core in a process of its own, for an event loop.

The process is started by the client, or runs already.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod

import zmq

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.clients.media_data import media_messages
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_client.processes.spare import Spares
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.addresses import check_address
from llmstack_engine_core.ipc.keys import keys_for
from llmstack_engine_core.ipc.link import Link
from llmstack_engine_core.ipc.sockets import connect_client_socket, has_message
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, AbortRequests, ClientMessage, Goodbye, Hello
from llmstack_types import EngineCoreRequest

# A message on its way through ZeroMQ's thread when the process ends; it may carry the reason.
LAST_WORDS_S = 0.05
RESEND_S = 0.002
# The last message of an attached client on its way.
FAREWELL_MS = 200
DEFAULT_START_TIMEOUT_S = 600.0


class AsyncSocketClient(AsyncClient):
    """A client over a socket; may be constructed outside a running loop.

    The loop itself watches the socket's descriptor: a round trip then takes a third less processor time here than over
    `zmq.asyncio` (100 against 145 microseconds, both loops), and a process that dies wakes everyone who waits.
    """

    def __init__(self, address: str, client_index: int, start_timeout_s: float, link: Link | None = None) -> None:
        super().__init__(start_timeout_s)
        self._context = zmq.Context()
        self._socket = connect_client_socket(self._context, address, client_index, link)
        self._socket.send(CLIENT_MESSAGES.encode(Hello()), zmq.NOBLOCK)
        self._socket_fd = int(self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undeclared_death: str | None = None  # it may have left last words

    @property
    @abstractmethod
    def _death_fd(self) -> int:
        """Becomes readable when the engine core may be gone."""

    @abstractmethod
    def _find_death(self) -> str | None:
        """Why the engine core is gone, if it is."""

    async def _send(self, message: ClientMessage) -> None:
        if self._loop is None:
            self._attach()
        if self._undeclared_death is not None and isinstance(message, EngineCoreRequest):  # no process would receive it
            self._declare_dead(self._undeclared_death)
            self._mailbox.check_alive()
        frame = CLIENT_MESSAGES.encode(message)
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

    def _attach(self) -> None:
        if self._loop is None and not self._socket.closed:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket_fd, self._on_readable)
            self._loop.add_reader(self._death_fd, self._on_death)
            self._on_readable()
            self._on_death()

    def _detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket_fd)
            self._loop.remove_reader(self._death_fd)

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
        death = self._find_death()
        if death is not None and self._loop is not None:
            self._loop.remove_reader(self._death_fd)
            self._undeclared_death = death
            self._loop.call_later(LAST_WORDS_S, self._declare_dead, death)

    def _declare_dead(self, death: str) -> None:
        self._on_readable()
        self._mailbox.set_dead(death)
        self._wake()

    def _close_socket(self) -> None:
        self._socket.close()
        self._context.term()
        self._wake()


class AsyncMPClient(AsyncSocketClient):
    """Starts the process at once, and ends it."""

    def __init__(self, config: EngineConfig, spares: Spares | None = None) -> None:
        """`spares`: May have one that has loaded the model already; kept in stock while the engine core serves."""
        self._process = launch_engine_process(config, spares=spares)
        self._spares = spares
        self._watch: asyncio.TimerHandle | None = None
        super().__init__(self._process.address, 0, config.start_timeout_s)

    @property
    def was_ended_from_outside(self) -> bool:
        """As for any client; and a process that a signal from outside has ended could not say so."""
        return super().was_ended_from_outside or self._process.was_ended_from_outside

    @property
    def pid(self) -> int:
        """The process id of the engine core."""
        return self._process.pid

    @property
    def _death_fd(self) -> int:
        return self._process.death_fd

    def _attach(self) -> None:
        super()._attach()
        if self._watch is None and self._loop is not None and not self._socket.closed:
            self._check_process()

    def _check_process(self) -> None:
        """Ends a process that hangs, which then counts as dead."""
        self._process.look()
        if self._spares is not None and self._process.has_been_ready:
            self._spares.prepare()
        if self._loop is not None and self._process.is_alive:
            self._watch = self._loop.call_later(self._process.look_interval_s, self._check_process)

    def _find_death(self) -> str | None:
        if self._process.is_alive:
            return None
        return f"the engine core's process has ended: {self._process.describe_end()}"

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
        if self._watch is not None:
            self._watch.cancel()
        self._process.stop()
        self._close_socket()


class AsyncAttachedClient(AsyncSocketClient):
    """Uses an engine core that another program runs: the end of the connection counts as its end."""

    def __init__(
        self,
        address: str,
        client_index: int = 0,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        link: Link | None = None,
    ) -> None:
        """`client_index`: Which of several clients of one server this is; the first sees the figures of every step.

        Raises:
            EngineStartError: No engine core may listen at such an address.
        """
        link = link or Link()
        check_address(address, is_remote=link.is_remote)
        keys_for(address, link.key_file)  # before there is a socket to close
        self._address, self._is_remote = address, link.is_remote
        super().__init__(address, client_index, start_timeout_s, link)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._is_disconnected = False

    async def _send(self, message: ClientMessage) -> None:
        if not (self._is_remote and isinstance(message, EngineCoreRequest) and message.media):
            await super()._send(message)
            return
        try:
            for part in media_messages(message):
                await super()._send(part)
                await asyncio.sleep(0)  # each takes some milliseconds to read
        except BaseException:  # what has been sent so far waits for a request that does not come
            with contextlib.suppress(zmq.ZMQError):
                frame = CLIENT_MESSAGES.encode(AbortRequests((message.request_id,)))
                self._socket.send(frame, zmq.NOBLOCK)
            raise

    @property
    def _death_fd(self) -> int:
        return self._monitor_fd

    def _find_death(self) -> str | None:
        if not self._is_disconnected and not self._monitor.closed and has_message(self._monitor):
            self._is_disconnected = True
        return f"the engine core at {self._address} is gone" if self._is_disconnected else None

    async def shutdown(self) -> None:
        """Ends this client's requests and leaves the engine core to others. Idempotent."""
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):  # the engine core reads nothing; it will notice
            self._socket.send(CLIENT_MESSAGES.encode(Goodbye()), zmq.NOBLOCK)
        self._mailbox.set_dead("the client has been shut down")
        self._detach()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._close_socket()
