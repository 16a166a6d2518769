"""What the log of an engine core says of clients that leave its socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from engine_core_helpers.messages import encode

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.engine_core_proc import EngineCoreProc
from llmstack_engine_core.ipc.sockets import bind_engine_socket
from llmstack_engine_core.messages.protocol import ClientMessage, Goodbye, Hello
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

REQUEST = EngineCoreRequest("r", [5, 6, 7], SamplingParams(max_tokens=100, seed=0))
TIMEOUT_MS = 10_000


class Proc(EngineCoreProc):
    """An engine core with one client, which reads and computes when the test says so."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        socket = bind_engine_socket(context, address)
        super().__init__(build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo")), socket)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._client = context.socket(zmq.DEALER)
        self._client.connect(address)

    def take(self, *messages: ClientMessage) -> None:
        for message in messages:
            self._client.send(encode(message))
            assert self._receive(TIMEOUT_MS)

    def leave(self, *last_words: ClientMessage) -> None:
        """Returns when the socket knows that the client has gone; nothing is read."""
        for message in last_words:
            self._client.send(encode(message))
        self._client.close(linger=TIMEOUT_MS)
        assert self._monitor.poll(TIMEOUT_MS)

    def step_until_missed(self) -> None:
        """Computes until the outputs of a step reach no client."""
        for _ in range(100):
            self._send_outputs(self._core.step())
            if not self._clients:
                return
            self._monitor.poll(10)  # the socket learns a moment after its monitor that the client has gone
            self._socket.get(zmq.EVENTS)
        raise AssertionError("the client is still there")

    def read(self) -> None:
        self._receive(0)

    def close(self) -> None:
        self._socket.disable_monitor()
        for socket in (self._client, self._monitor, self._socket):
            socket.close(linger=0)


@pytest.fixture
def proc(tmp_path: Path) -> Iterator[Proc]:
    with zmq.Context() as context:
        proc = Proc(context, f"ipc://{tmp_path}/engine")
        yield proc
        proc.close()


def test_a_client_that_says_goodbye_within_a_step_is_no_loss(proc: Proc, caplog: pytest.LogCaptureFixture) -> None:
    proc.take(Hello(), REQUEST)
    proc.leave(Goodbye())
    proc.step_until_missed()
    proc.read()
    assert not caplog.records


def test_a_client_that_goes_without_a_goodbye_is_a_loss(proc: Proc, caplog: pytest.LogCaptureFixture) -> None:
    proc.take(Hello(), REQUEST)
    proc.leave()
    proc.step_until_missed()
    proc.read()
    (record,) = caplog.records
    assert "without a goodbye" in record.getMessage()
