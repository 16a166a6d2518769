"""Clients that leave the socket of an engine core, and long messages, which are decoded beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from engine_core_helpers.messages import encode

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.engine_core_proc import EngineCoreProc
from llmstack_engine_core.ipc import long_frames
from llmstack_engine_core.ipc.sockets import bind_engine_socket
from llmstack_engine_core.messages.protocol import AbortRequests, ClientMessage, Goodbye, Hello
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

REQUEST = EngineCoreRequest("r", [5, 6, 7], SamplingParams(max_tokens=100, seed=0))
LONG = EngineCoreRequest("long", [5] * (long_frames.LONG_BYTES // 4 + 1), SamplingParams(max_tokens=1, seed=0))
TIMEOUT_MS = 10_000


class Proc(EngineCoreProc):
    """An engine core with one client, which reads and computes when the test says so."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        socket = bind_engine_socket(context, address)
        super().__init__(build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo")), socket)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._client = context.socket(zmq.DEALER)
        self._client.connect(address)
        self.handled: list[ClientMessage] = []

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        self.handled.append(message)
        super()._handle(client, message)

    def send(self, *messages: ClientMessage) -> None:
        for message in messages:
            self._client.send(encode(message))

    def read_until(self, is_done: Callable[[], bool]) -> None:
        """Reads between steps, as a busy engine core does."""
        for _ in range(TIMEOUT_MS):
            self._receive(0)
            if is_done():
                return
            self._monitor.poll(1)
        raise AssertionError("it has not come")

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


def test_messages_behind_a_long_one_wait_for_it_and_steps_do_not(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    may_decode, decode = threading.Event(), long_frames.decode

    def wait_and_decode(frames: Sequence[bytes]) -> ClientMessage:
        assert may_decode.wait(TIMEOUT_MS / 1000)
        return decode(frames)

    proc.take(Hello(), REQUEST)
    monkeypatch.setattr(long_frames, "decode", wait_and_decode)
    end = AbortRequests(("long", "r"))
    proc.send(LONG, end)
    proc.read_until(lambda: proc._long._num_bytes > 4 * len(LONG.prompt_token_ids))
    for _ in range(3):
        proc.read()
    assert proc.handled == [Hello(), REQUEST]
    assert proc._core.has_unfinished_requests()
    may_decode.set()
    proc.read_until(lambda: end in proc.handled)
    assert proc.handled == [Hello(), REQUEST, LONG, end]
    assert not proc._long.is_waiting
    assert proc._long._num_bytes == 0


def test_a_long_message_that_is_none_is_refused_and_those_behind_it_are_handled(proc: Proc) -> None:
    proc.take(Hello(), REQUEST)
    proc._client.send(b"\xc1" * (long_frames.LONG_BYTES + 1))
    proc.send(AbortRequests(("r",)))
    proc.read_until(lambda: len(proc.handled) == 3)
    assert proc._num_refused == 1


def test_an_idle_engine_core_decodes_a_long_message_at_once(proc: Proc) -> None:
    proc.take(Hello(), LONG)
    assert proc.handled == [Hello(), LONG]


def test_no_more_than_some_bytes_are_read_behind_a_long_message(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_frames, "MAX_HELD_BYTES", long_frames.LONG_BYTES)
    may_decode, decode = threading.Event(), long_frames.decode

    def wait_and_decode(frames: Sequence[bytes]) -> ClientMessage:
        assert may_decode.wait(TIMEOUT_MS / 1000)
        return decode(frames)

    monkeypatch.setattr(long_frames, "decode", wait_and_decode)
    proc.take(Hello())
    proc.take(REQUEST)
    last = AbortRequests(("r",))
    proc.send(LONG, last)
    proc.read_until(lambda: proc._long.is_full)
    proc.read()
    assert len(proc._long._held[next(iter(proc._long._held))]) == 1
    may_decode.set()
    proc.read_until(lambda: last in proc.handled)
    assert proc.handled[-2:] == [LONG, last]
