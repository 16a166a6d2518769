"""A running server over real sockets: limits of HTTP, readiness, the drain, and the engine's death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest
from server_helpers.running import STREAM, Start, post_bytes
from server_helpers.waiting import wait_until

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.serving import server
from llmstack_server.serving.sockets import bind_socket, url_of
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.testing import FakeEngineClient
from llmstack_types import EngineStartError


async def test_health_answers_while_loading_and_ready_is_said_once(start: Start):
    running = await start(is_ready=False)
    status, headers, body = await running.get("/health")
    assert (status, json.loads(body)["status"]) == (503, "Initializing Engine")
    assert {"date", "x-request-id", "content-length"} <= set(headers)
    await running.become_ready()
    assert (await running.get("/health"))[0] == 200
    assert running.num_ready_calls == 1


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/ping", "/metrics", "/version", "/load", "/server_info", "/v1/models"]
)
async def test_probes_answer_head_as_get_without_a_body(start: Start, path: str):
    running = await start()
    status, headers, body = await running.get(path)
    head = await running.ask(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert (status, body == b"") == (200, path == "/ping")
    assert (head[0], head[2]) == (200, b"")
    assert headers.keys() == head[1].keys()
    assert head[1].get("content-type") == headers.get("content-type")


async def test_health_answers_while_the_model_is_still_being_looked_for(start: Start):
    running = await start(is_ready=False, is_engine_open=False)
    assert running.opening is not None
    status, _, body = await running.get("/health")
    assert (status, json.loads(body)["status"]) == (503, "Loading Model")
    assert (await running.post(STREAM))[0] == 503
    assert (await running.get("/server_info"))[0] == 200
    running.opening.set_result(running.engine)
    await running.become_ready()
    assert (await running.get("/health"))[0] == 200


async def test_a_model_that_cannot_be_found_ends_the_server_with_its_sentence(start: Start):
    running = await start(is_ready=False, is_engine_open=False)
    assert running.opening is not None
    running.opening.set_exception(ServeError("There is no model x"))
    with pytest.raises(ServeError, match="no model x"):
        await running.task


async def test_a_client_that_closes_its_socket_aborts_its_request(start: Start):
    running = await start()
    running.engine.step_delay_s = 0.005
    reader, writer = await running.send(post_bytes(STREAM))
    await reader.readuntil(b"data: ")
    writer.close()
    await wait_until(lambda: running.engine.aborted_request_ids)
    assert running.engine.num_running == 0


@pytest.mark.parametrize(
    ("is_slow", "timeout_s"),
    [pytest.param(False, 0.2, id="stopped"), pytest.param(True, 1.5, id="slow", marks=pytest.mark.full)],
)
async def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_one_is_not(
    start: Start, is_slow: bool, timeout_s: float
):
    running = await start(HTTPConfig(send_timeout_s=timeout_s, uvicorn_log_level="critical"))
    running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted sockets inherit it
    running.engine.script = "x" * 80
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", running.port))
    await loop.sock_sendall(
        client, post_bytes({**STREAM, "max_tokens": 80, "n": 8, "logprobs": 5}, "Connection: close\r\n")
    )
    received = b""
    with client:
        if is_slow:
            while piece := await loop.sock_recv(client, 8192):
                received += piece
                await asyncio.sleep(0.1)
            assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert not running.engine.aborted_request_ids
        else:
            await wait_until(lambda: running.engine.aborted_request_ids)
    await wait_until(lambda: running.state.in_flight.count == 0)
    assert running.engine.num_running == 0


async def test_streams_advance_together(start: Start):
    running = await start()
    running.engine.step_delay_s = 0.005
    connections = [await running.send(post_bytes(STREAM)) for _ in range(8)]
    for reader, _ in connections:
        await reader.readuntil(b"data: ")
    assert running.engine.num_running == 8
    for _, writer in connections:
        writer.close()


@pytest.fixture
def _hangup_ends() -> Iterator[None]:
    """The disposition of SIGHUP of a process that was not started by `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangup_ends")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_drains_and_ends_with_0(start: Start, number: int):
    running = await start()
    running.engine.step_delay_s = 0.005
    stream = asyncio.create_task(running.post(STREAM))
    await wait_until(lambda: running.engine.num_running)
    os.kill(os.getpid(), number)
    await wait_until(lambda: running.state.lifecycle.is_stopping)
    status, headers, body = await running.post(STREAM)
    assert (status, json.loads(body)["error"]["code"]) == (503, "server_shutting_down")
    assert headers["connection"] == "close"
    assert (await stream)[2].rstrip(b"0\r\n").endswith(b"data: [DONE]")
    assert await running.task == 0
    assert running.state.lifecycle.state is LifecycleState.STOPPED


async def test_a_timeout_of_zero_cuts_what_is_running(start: Start):
    running = await start(HTTPConfig(shutdown_timeout_s=0.0, uvicorn_log_level="critical"))
    running.engine.step_delay_s = 0.01
    stream = asyncio.create_task(running.post(STREAM))
    await wait_until(lambda: running.engine.num_running)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running.task == 0
    body = (await stream)[2]
    assert b"server_shutting_down" in body
    assert b"[DONE]" not in body


@pytest.mark.parametrize(("length", "status"), [(4000, 503), (40_000_000, 413)])
async def test_a_body_that_comes_slowly_is_answered_at_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, length: int, status: int
):
    monkeypatch.setattr(server, "FLUSH_TIMEOUT_S", 1.0)
    running = await start(HTTPConfig(uvicorn_log_level="error"))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    reader, writer = await running.send(head.encode())
    begun = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)

    async def drip() -> None:
        while True:
            writer.write(b"a")
            await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip())
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running.task, 10) == 0
    assert b"HTTP/1.1 %d " % status in begun + await asyncio.wait_for(reader.read(), 5)
    dripping.cancel()
    writer.close()
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.usefixtures("_hangup_ends")
async def test_a_second_hangup_cuts_nothing(start: Start):
    running = await start()
    running.engine.step_delay_s = 0.02
    stream = asyncio.create_task(running.post(STREAM))
    await wait_until(lambda: running.engine.num_running)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGHUP)
        await wait_until(lambda: running.state.lifecycle.is_stopping)
    assert (await stream)[2].rstrip(b"0\r\n").endswith(b"data: [DONE]")
    assert await running.task == 0


async def test_a_hangup_is_ignored_where_the_process_was_started_so(start: Start):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = await start()
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await running.get("/ready"))[0] == 200
        assert not running.state.lifecycle.is_stopping
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_second_signal_does_not_wait(start: Start):
    running = await start()
    running.engine.step_delay_s = 0.5
    stream = asyncio.create_task(running.post(STREAM))
    await wait_until(lambda: running.engine.num_running)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running.task == 128 + signal.SIGTERM
    await asyncio.gather(stream, return_exceptions=True)


async def test_what_fails_at_the_end_keeps_nothing_else_from_ending(start: Start, caplog: pytest.LogCaptureFixture):
    running, ended = await start(), list[str]()

    async def fail() -> None:
        raise OSError("the disk is gone")

    async def end() -> None:
        ended.append("other")

    running.state.at_end += [fail, end]
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await running.task, ended) == (0, ["other"])
    assert "the disk is gone" in caplog.text


async def test_a_signal_while_loading_ends_with_0(start: Start):
    running = await start(is_ready=False)
    await running.get("/ping")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running.task == 0
    assert running.num_ready_calls == 0


async def test_an_engine_that_cannot_start_is_an_error_of_one_line(start: Start, monkeypatch: pytest.MonkeyPatch):
    async def fail(self: FakeEngineClient) -> None:
        raise EngineStartError("not enough\nmemory")

    monkeypatch.setattr(FakeEngineClient, "wait_until_ready", fail)
    running = await start(is_ready=False)
    with pytest.raises(ServeError, match="not enough memory"):
        await running.task


async def test_the_engines_death_ends_streams_with_an_error_and_the_server_with_1(
    start: Start, caplog: pytest.LogCaptureFixture
):
    running = await start()
    running.engine.step_delay_s = 0.01
    stream = asyncio.create_task(running.post(STREAM))
    await wait_until(lambda: running.engine.num_running)
    running.engine.is_dead = True
    assert await running.task == 1
    body = (await stream)[2]
    assert b"engine_unavailable" in body
    assert b"[DONE]" not in body
    assert [r.getMessage() for r in caplog.records if "engine core died" in r.getMessage()]


def test_a_port_in_use_names_itself_and_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port} .* --port"):
            bind_socket("127.0.0.1", port)


def test_an_address_of_another_machine_names_the_flag():
    with pytest.raises(ServeError, match="--host"):
        bind_socket("192.0.2.1", 0)


def test_the_address_shows_the_port_that_was_chosen():
    with bind_socket("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
