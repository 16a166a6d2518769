"""Answers in the call that reads the headers, and the time that bytes have waited for it."""

from __future__ import annotations

import json
import socket
import time

import pytest
from server_helpers.overload import overload
from server_helpers.running import Start, post_bytes

from llmstack_server.serving.early_answers import waited_s
from llmstack_server.serving.uvicorn_protocol import LimitedProtocol


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux says when bytes came")
def test_the_time_in_the_queue_of_connections_counts():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"x")
        time.sleep(0.1)
        connection, _ = listener.accept()
        with connection:
            assert waited_s(connection) > 0.05


def test_other_sockets_have_not_waited():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert waited_s(ours) == 0.0
    assert waited_s(None) == 0.0
    closed = socket.socket()
    closed.close()
    assert waited_s(closed) == 0.0


async def test_a_refusal_needs_no_turn_of_the_loop_and_leaves_the_connection_open(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    written_in_call = list[bool]()
    received = LimitedProtocol.data_received

    def note(self: LimitedProtocol, data: bytes) -> None:
        received(self, data)
        written_in_call.append(self.cycle is not None and self.cycle.response_complete)

    monkeypatch.setattr(LimitedProtocol, "data_received", note)
    running = await start()
    overload(running.state)
    reader, writer = await running.send(post_bytes({"prompt": "Hello"}) * 2)
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["error"]["code"] == "server_is_overloaded"
    writer.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert written_in_call[0]
    assert not running.engine.admitted


async def test_a_client_of_http_1_0_is_refused_too(start: Start):
    running = await start()
    overload(running.state)
    raw = post_bytes({"prompt": "Hello"}).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert (await running.ask(raw))[0] == 503
