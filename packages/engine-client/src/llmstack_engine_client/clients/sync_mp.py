"""Client of an engine core in a process of its own, for plain code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import zmq

from llmstack_engine_client.clients.mailbox import Mailbox
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.sockets import connect_client_socket, has_message
from llmstack_engine_core.messages.control import ControlCall
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, AbortRequests, ClientMessage, Hello
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    Operation,
)
from llmstack_types.control import ArgumentTs, ResultT

# A message on its way through ZeroMQ's thread when the process ends; it may carry the reason.
LAST_WORDS_MS = 50


class SyncMPClient:
    """Starts the process at once; used by one thread. In a fork of its process every call raises `EngineDeadError`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._owner_pid = os.getpid()
        self._mailbox = Mailbox()
        self._process = launch_engine_process(config)
        self._context = zmq.Context()
        self._socket = connect_client_socket(self._context, self._process.address, client_index=0)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._process.death_fd, zmq.POLLIN)
        self._send(Hello())

    @property
    def is_dead(self) -> bool:
        """True once the engine core is gone."""
        return self._mailbox.death is not None or not self._process.is_alive

    @property
    def pid(self) -> int:
        """The process id of the engine core."""
        return self._process.pid

    def wait_until_ready(self) -> EngineReady:
        """Waits for the engine core's first message, `start_timeout_s` at most.

        Raises:
            EngineStartError: It could not start; the text says why. The process is gone.
        """
        try:
            self._wait_for(self._mailbox.is_start_over, self._config.start_timeout_s)
            return self._mailbox.take_ready()
        except EngineStartError:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request.

        Raises:
            EngineDeadError: The engine core is gone.
            InvalidRequestError: The id is in use.
            CodecError: A value is outside what the protocol can carry.
        """
        self._check_alive()
        self._mailbox.register(request.request_id)
        try:
            self._send(request)
        except ValueError:
            self._mailbox.forget([request.request_id])
            raise

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; no output follows the engine core's receipt. Does nothing once the engine core is gone."""
        known = self._mailbox.forget(request_ids)
        if known and self._mailbox.death is None and self._owner_pid == os.getpid():
            self._send(AbortRequests(tuple(known)))

    def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step; call it only while requests are unfinished.

        Raises:
            EngineDeadError: The engine core is gone.
        """
        self._check_owner()
        outputs = self._mailbox.outputs
        if not outputs:
            self._wait_for(lambda: bool(outputs) or self._mailbox.death is not None)
        if outputs:
            return outputs.popleft()
        self._mailbox.check_alive()
        return EngineCoreOutputs([])

    def call(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Asks the engine core for something besides requests; see `Control`."""
        mailbox = self._mailbox
        self._check_alive()
        call_id = mailbox.begin_call(operation)
        try:
            self._send(ControlCall(call_id, operation, arguments))
            self._wait_for(lambda: mailbox.is_call_over(call_id))
            result: ResultT = mailbox.result_of(call_id)
            return result
        finally:
            mailbox.end_call(call_id)

    def shutdown(self) -> None:
        """Stops the engine core and removes every process, socket and file of it. Idempotent; in a fork nothing."""
        if self._owner_pid != os.getpid():
            return
        self._mailbox.set_dead("the engine core has been shut down")
        self._process.stop()
        self._socket.close()
        self._context.term()

    def _check_alive(self) -> None:
        self._check_owner()
        self._mailbox.check_alive()

    def _check_owner(self) -> None:
        """Raises in a fork: ZeroMQ's threads are not there, so a call would wait for ever."""
        if self._owner_pid != os.getpid():
            raise EngineDeadError("this process is a fork of the one that started the engine core; start one here")

    def _send(self, message: ClientMessage) -> None:
        frame = CLIENT_MESSAGES.encode(message)
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:  # the engine core is in a long step and thousands of messages wait
                self._receive(10)
                self._mailbox.check_alive()

    def _wait_for(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_done():
            if deadline_s is None:
                self._receive(int(self._process.look_interval_s * 1000) or None)
                self._process.look()
                continue
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise EngineStartError(f"the engine core was not ready within {timeout_s:g} s")
            self._receive(int(remaining_s * 1000) + 1)

    def _receive(self, timeout_ms: int | None) -> None:
        is_dead = any(ready == self._process.death_fd for ready, _ in self._poller.poll(timeout_ms))
        if is_dead:
            # Everything it sent before it ended counts, the reason for its end above all.
            self._socket.poll(LAST_WORDS_MS)
        while has_message(self._socket):
            self._mailbox.put(self._socket.recv())
        if is_dead:
            self._mailbox.set_dead(f"the engine core's process has ended: {self._process.describe_end()}")
