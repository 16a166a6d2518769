"""A running server over real sockets: limits of HTTP, readiness, the drain, and the engine's death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.serving.server import Server
from llmstack_server.serving.sockets import bind_socket, url_of
from llmstack_server.serving.uvicorn_protocol import MAX_HEADER_BYTES, LimitedProtocol
from llmstack_server.state.lifecycle import Lifecycle, LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_types import EngineStartError

STREAM = {"prompt": "Hello", "max_tokens": 100, "stream": True}


class Running:
    """One server with its engine, on a port of its own."""

    def __init__(self, http: HTTPConfig | None = None, *, is_engine_open: bool = True) -> None:
        self.engine = FakeEngineClient()
        self.engine.readiness.clear()
        self.state: ServerState = ready_state(self.engine, http or HTTPConfig(uvicorn_log_level="critical"))
        self.state.lifecycle = Lifecycle()
        self.state.lifecycle.advance(LifecycleState.LOADING_MODEL)
        self.listener = bind_socket("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.num_ready_calls = 0
        self.opening: asyncio.Future[Any] | None = None
        if not is_engine_open:
            self.state.opened_engine, self.opening = None, asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(Server(self.state, self.listener, self.opening).run(self._on_ready))

    async def _on_ready(self) -> None:
        self.num_ready_calls += 1

    async def become_ready(self) -> None:
        self.engine.readiness.set()
        await wait_until(lambda: self.state.lifecycle.is_ready)

    async def send(self, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(raw)
        return reader, writer

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        """Sends bytes; the answer, which ends with the connection."""
        reader, writer = await self.send(raw)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())

    async def post(self, body: Any) -> tuple[int, dict[str, str], bytes]:
        return await self.ask(post_bytes(body, "Connection: close\r\n"))


def post_bytes(body: Any, headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[Running] = []

    async def run(http: HTTPConfig | None = None, *, is_ready: bool = True, is_engine_open: bool = True) -> Running:
        running = Running(http, is_engine_open=is_engine_open)
        started.append(running)
        if is_ready:
            await running.become_ready()
        return running

    yield run
    for running in started:
        if not running.task.done():
            running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        running.listener.close()


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
    head = await running.ask(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
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


async def test_headers_beyond_the_limit_are_refused_in_one_piece_or_many(start: Start):
    running = await start()
    many = "".join(f"X-{i}: y\r\n" for i in range(200))
    for raw in (
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEADER_BYTES + 10) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (MAX_HEADER_BYTES * 3),
        b"GET /" + b"a" * (MAX_HEADER_BYTES + 10) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: x\r\n{many}\r\n".encode(),
    ):
        status, headers, body = await running.ask(raw)
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        assert headers["connection"] == "close"
        assert headers["x-request-id"]
    assert (await running.get("/health"))[0] == 200


async def test_the_limits_of_headers_can_be_set(start: Start):
    running = await start(HTTPConfig(max_header_bytes=2048, max_num_headers=5, uvicorn_log_level="critical"))
    few = "".join(f"X-{i}: y\r\n" for i in range(3))
    raw = f"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{few}"
    assert (await running.ask(f"{raw}\r\n".encode()))[0] == 200
    assert (await running.ask(f"{raw}X-4: y\r\n\r\n".encode()))[0] == 431
    assert (await running.ask(b"GET /ping HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 2048 + b"\r\n\r\n"))[0] == 431


async def test_bytes_that_are_not_http_get_a_minimal_answer(start: Start):
    running = await start()
    status, _, body = await running.ask(b"\x16\x03\x01 hello\r\n\r\n")
    assert status == 400
    assert len(body) < 200


async def test_headers_that_never_end_time_out(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "headers_timeout_s", 0.05)
    running = await start()
    status, _, body = await running.ask(b"GET /health HTTP/1.1\r\nHost: ")
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    reader, writer = await running.send(b"")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_body_shorter_than_it_says_times_out(start: Start):
    running = await start(HTTPConfig(receive_timeout_s=0.05, uvicorn_log_level="critical"))
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 118\r\n\r\n{}"
    status, _, body = await running.ask(raw)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


async def test_a_declared_large_body_is_refused_before_it_is_sent(start: Start):
    running = await start()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    status, _, body = await running.ask(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


async def test_a_chunked_large_body_is_refused_while_it_is_sent(start: Start):
    running = await start(HTTPConfig(max_body_bytes=1 << 16, uvicorn_log_level="critical"))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    status, _, body = await running.ask(head.encode() + chunk * 20 + b"0\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CHUNK = b'1d\r\n{"prompt":"a","max_tokens":1}\r\n'


async def send_without_end(running: Running, head: bytes, piece: bytes) -> tuple[int, bytes]:
    """Sends `piece` until the server closes the connection; returns how many bytes it took and its answer."""
    reader, writer = await running.send(head)
    answer = asyncio.create_task(reader.read())
    num_bytes = 0
    try:
        while not answer.done() and num_bytes < 64 << 20:
            writer.write(piece)
            await writer.drain()
            num_bytes += len(piece)
    except OSError:
        pass
    writer.close()
    try:
        return num_bytes, await asyncio.wait_for(answer, 5)
    except OSError:
        return num_bytes, b""


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (CHUNKED + CHUNK + b"0\r\n", b"X-Trailer: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + CHUNK + b"0\r\n" + b"X-Trailer: ", b"a" * 1000),
        (CHUNKED + CHUNK + b"1;", b"a" * 1000),
    ],
    ids=["trailers", "one trailer", "an extension of a chunk"],
)
async def test_what_is_neither_header_nor_body_is_bounded(start: Start, head: bytes, piece: bytes):
    running = await start()
    num_bytes, answer = await send_without_end(running, head, piece)
    assert num_bytes < 32 << 20  # what is sent before the answer is read; without a limit it would be 64 MiB
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert (await running.get("/health"))[0] == 200


async def test_trailers_never_become_headers(start: Start):
    running = await start(HTTPConfig(api_keys=(Secret("key"),), uvicorn_log_level="critical"))
    raw = (
        CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close") + CHUNK + b"0\r\nAuthorization: Bearer key\r\n\r\n"
    )
    assert (await running.ask(raw))[0] == 401


async def test_small_chunks_are_no_attack(start: Start):
    running = await start()
    body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode().ljust(20_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close")
    status, _, answer = await running.ask(head + chunks + b"0\r\nX-Sum: 1\r\n\r\n")
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == "Hel"


async def test_a_request_that_ends_after_its_answer_is_not_read_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "linger_s", 0.1)
    running = await start()
    unknown = CHUNKED.replace(b"/v1/completions", b"/unknown")
    reader, writer = await running.send(unknown)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404 ")
    writer.write(CHUNK)
    await asyncio.wait_for(reader.read(), 5)  # the connection ends, although the request does not
    writer.close()
    num_bytes, answer = await send_without_end(running, unknown, b"8000\r\n" + b"a" * 0x8000 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ") or not answer
    assert num_bytes < 32 << 20


async def test_a_body_that_ends_soon_after_its_answer_leaves_the_connection_open(start: Start):
    running = await start()
    reader, writer = await running.send(CHUNKED.replace(b"/v1/completions", b"/unknown"))
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.write(CHUNK + b"0\r\n\r\n" + b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_one_deadline_holds_for_headers_body_and_trailers(start: Start):
    running = await start(HTTPConfig(receive_timeout_s=0.1, uvicorn_log_level="critical"))
    reader, writer = await running.send(CHUNKED + CHUNK + b"0\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    writer.close()


async def test_a_pipelined_request_may_wait_for_the_answers_before_it(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "request_timeout_s", 0.05)
    running = await start()
    running.engine.step_delay_s = 0.02
    second = post_bytes({"prompt": "yo", "max_tokens": 2}, "Connection: close\r\n")
    reader, writer = await running.send(post_bytes(STREAM) + second[:-4])
    await asyncio.sleep(0.2)
    writer.write(second[-4:])
    answer = await asyncio.wait_for(reader.read(), 20)
    assert b"data: [DONE]" in answer
    assert b'"text":"yo"' in answer
    writer.close()


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("GET /ping HTTP/1.1\r\n", 400, "invalid_host"),
        ("GET /ping HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400, "invalid_host"),
        ("GET /ping HTTP/1.1\r\nHost: a\r\nExpect: a-miracle\r\n", 417, "expectation_failed"),
    ],
)
async def test_a_request_names_one_host_and_expects_nothing_unknown(start: Start, head: str, status: int, code: str):
    running = await start()
    found, headers, body = await running.ask(f"{head}\r\n".encode())
    assert (found, json.loads(body)["error"]["code"]) == (status, code)
    assert headers["connection"] == "close"


async def test_http_1_0_needs_no_host(start: Start):
    running = await start()
    assert (await running.ask(b"GET /ping HTTP/1.0\r\n\r\n"))[0] == 200


async def test_a_kept_connection_serves_split_and_chunked_requests(start: Start):
    running = await start()
    reader, writer = await running.send(b"")
    raw = post_bytes({"prompt": "Hello", "max_tokens": 3})
    for index in range(0, len(raw), 7):
        writer.write(raw[index : index + 7])
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == "Hel"
    writer.write(post_bytes({"prompt": "yo", "max_tokens": 2, "stream": True}, "Connection: close\r\n"))
    body = await reader.read()
    assert b"transfer-encoding: chunked" in body.lower()
    assert b"data: [DONE]\n\n" in body
    writer.close()


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
