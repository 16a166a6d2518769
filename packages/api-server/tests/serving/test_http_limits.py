"""What clients send is bounded in size and time, and every request is read by itself."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from server_helpers.running import STREAM, Running, Start, post_bytes

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.serving import uvicorn_protocol
from llmstack_server.serving.uvicorn_protocol import MAX_HEADER_BYTES, MAX_NUM_PIPELINED, LimitedProtocol


async def test_headers_beyond_the_limit_are_refused_in_one_piece_or_many(start: Start):
    running = await start()
    many = "".join(f"X-{i}: y\r\n" for i in range(200))
    for raw in (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (MAX_HEADER_BYTES + 10) + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (MAX_HEADER_BYTES * 3),
        b"GET /" + b"a" * (MAX_HEADER_BYTES + 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n".encode(),
    ):
        status, headers, body = await running.ask(raw)
        assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
        assert headers["connection"] == "close"
        assert headers["x-request-id"]
    assert (await running.get("/health"))[0] == 200


async def test_the_limits_of_headers_can_be_set(start: Start):
    running = await start(HTTPConfig(max_header_bytes=2048, max_num_headers=5, uvicorn_log_level="critical"))
    few = "".join(f"X-{i}: y\r\n" for i in range(3))
    raw = f"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{few}"
    assert (await running.ask(f"{raw}\r\n".encode()))[0] == 200
    assert (await running.ask(f"{raw}X-4: y\r\n\r\n".encode()))[0] == 431
    assert (await running.ask(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2048 + b"\r\n\r\n"))[0] == 431


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


async def test_bytes_that_are_not_http_get_the_error_of_every_route(start: Start):
    running = await start()
    for raw in (
        b"\x16\x03\x01 hello\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\nabcde",
        POST + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
    ):
        status, headers, body = await running.ask(raw)
        error = json.loads(body)["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
        assert headers["connection"] == "close"
        assert headers["x-request-id"]


async def test_headers_that_never_end_time_out(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "headers_timeout_s", 0.05)
    running = await start()
    status, _, body = await running.ask(b"GET /health HTTP/1.1\r\nHost: ")
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    reader, writer = await running.send(b"")
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_body_shorter_than_it_says_times_out(start: Start):
    running = await start(HTTPConfig(receive_timeout_s=0.05, uvicorn_log_level="critical"))
    raw = POST + b"Content-Type: application/json\r\nContent-Length: 118\r\n\r\n{}"
    status, _, body = await running.ask(raw)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")


async def test_a_declared_large_body_is_refused_before_it_is_sent(start: Start):
    running = await start()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    status, _, body = await running.ask(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


async def test_a_chunked_large_body_is_refused_while_it_is_sent(start: Start):
    running = await start(HTTPConfig(max_body_bytes=1 << 16, uvicorn_log_level="critical"))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
    status, _, body = await running.ask(head.encode() + chunk * 20 + b"0\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


CHUNKED = POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
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
        return num_bytes, await asyncio.wait_for(answer, 30)
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
        CHUNKED.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
        + CHUNK
        + b"0\r\nAuthorization: Bearer key\r\n\r\n"
    )
    assert (await running.ask(raw))[0] == 401


async def test_small_chunks_are_no_attack(start: Start):
    running = await start()
    body = json.dumps({"prompt": "Hello", "max_tokens": 3}).encode().ljust(20_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = CHUNKED.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
    status, _, answer = await running.ask(head + chunks + b"0\r\nX-Sum: 1\r\n\r\n")
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == "Hel"


async def test_a_request_that_ends_after_its_answer_is_not_read_for_ever(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "linger_s", 0.1)
    monkeypatch.setattr(uvicorn_protocol, "LINGER_BYTES", 16 << 20)
    running = await start()
    unknown = CHUNKED.replace(b"/v1/completions", b"/unknown")
    reader, writer = await running.send(unknown)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 404 ")
    writer.write(CHUNK)
    await asyncio.wait_for(reader.read(), 30)  # the connection ends, although the request does not
    writer.close()
    num_bytes, answer = await send_without_end(running, unknown, b"8000\r\n" + b"a" * 0x8000 + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ") or not answer
    assert num_bytes < 32 << 20


def send_all_then_read(port: int, pieces: list[bytes]) -> bytes:
    """As clients do that read no answer while they send; OSError where the server has closed the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return connection.recv(1 << 16)


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 413), ("/unknown", 404)])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_reads_after_a_body_of_40_mb_gets_its_refusal(
    start: Start, path: str, status: int, is_chunked: bool
):
    running, piece = await start(), b"a" * (1 << 20)
    length = f"Content-Length: {40 << 20}"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n" if is_chunked else f"{length}\r\n\r\n"
    pieces = [b"%x\r\n%b\r\n" % (len(piece), piece)] * 40 + [b"0\r\n\r\n"] if is_chunked else [piece] * 40
    answer = await asyncio.to_thread(send_all_then_read, running.port, [head.encode(), *pieces])
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (b"connection: close" in answer.lower()) == (status == 413)


@pytest.mark.parametrize("framing", [f"Content-Length: {40 << 20}", "Content-Length: 1" + "0" * 17])
async def test_a_body_over_the_limit_is_refused_in_place_of_100_continue(start: Start, framing: str):
    running = await start()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n"
    status, headers, _ = await running.ask(f"{head}Expect: 100-continue\r\n\r\n".encode())
    assert (status, headers["connection"]) == (413, "close")


async def test_a_body_that_ends_soon_after_its_answer_leaves_the_connection_open(start: Start):
    running = await start()
    reader, writer = await running.send(CHUNKED.replace(b"/v1/completions", b"/unknown"))
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.write(CHUNK + b"0\r\n\r\n" + b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_one_deadline_holds_for_headers_body_and_trailers(start: Start):
    running = await start(HTTPConfig(receive_timeout_s=0.1, uvicorn_log_level="critical"))
    reader, writer = await running.send(CHUNKED + CHUNK + b"0\r\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    writer.close()


async def test_of_many_requests_in_one_piece_only_some_are_taken(start: Start):
    running = await start()
    reader, writer = await running.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 9000)
    answers = await asyncio.wait_for(reader.read(), 30)  # the connection ends
    writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == MAX_NUM_PIPELINED + 1
    assert answers.count(b"connection: close") == 1
    assert (await running.get("/health"))[0] == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_answered_though_bytes_that_are_no_request_follow_it(start: Start, is_stream: bool):
    running = await start()
    request = post_bytes({"model": "fake", "prompt": "abc", "max_tokens": 3, "stream": is_stream})
    status, _, body = await running.ask(request + b"NO REQUEST\r\n\r\n")
    assert status == 200
    assert (b"[DONE]" in body) == is_stream
    assert body.count(b"HTTP/1.1") == 0


async def test_a_pipelined_request_may_wait_for_the_answers_before_it(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LimitedProtocol, "request_timeout_s", 0.05)
    running = await start()
    running.engine.step_delay_s = 0.02
    second = post_bytes({"prompt": "yo", "max_tokens": 2}, "Connection: close\r\n")
    reader, writer = await running.send(post_bytes(STREAM) + second[:-4])
    await asyncio.sleep(0.2)
    writer.write(second[-4:])
    answer = await asyncio.wait_for(reader.read(), 30)
    assert b"data: [DONE]" in answer
    assert b'"text":"yo"' in answer
    writer.close()


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("GET /ping HTTP/1.1\r\n", 400, "invalid_host"),
        ("GET /ping HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400, "invalid_host"),
        ("GET /ping HTTP/1.1\r\nHost: localhost\r\nExpect: a-miracle\r\n", 417, "expectation_failed"),
        ("POST /ping HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n", 400, "invalid_http"),
    ],
)
async def test_a_request_names_one_host_and_expects_nothing_unknown(start: Start, head: str, status: int, code: str):
    running = await start()
    found, headers, body = await running.ask(f"{head}\r\n".encode())
    assert (found, json.loads(body)["error"]["code"]) == (status, code)
    assert headers["connection"] == "close"


async def test_http_1_0_needs_no_host_and_gets_no_interim_answer(start: Start):
    running = await start()
    assert (await running.ask(b"GET /ping HTTP/1.0\r\n\r\n"))[0] == 200
    for expectation in (b"100-continue", b"a-miracle"):
        head = b"POST /tokenize HTTP/1.0\r\nExpect: %s\r\nContent-Type: application/json\r\n" % expectation
        body = b'{"model": "fake", "prompt": "a"}'
        assert (await running.ask(head + b"Content-Length: %d\r\n\r\n" % len(body) + body))[0] == 200


async def test_blanks_behind_a_value_are_no_part_of_it(start: Start):
    running = await start()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost \t\r\nExpect: 100-continue \r\n"
    body = b'{"model": "fake", "prompt": "a", "max_tokens": 2}'
    head += b"Content-Type: application/json\r\nConnection: close\r\nX-llmstack-deadline-ms: 5000\t \r\n"
    head += b"Content-Length: %d \r\n\r\n" % len(body)
    status, _, answer = await running.ask(head + body)
    assert status == 100
    assert b" 200 OK" in answer


async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(start: Start):
    running = await start()
    raw = post_bytes({"prompt": "Hello", "max_tokens": 3, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    status, headers, body = await running.ask(raw)
    assert (status, headers.get("connection", "close")) == (200, "close")  # the rule of HTTP/1.0 where it is absent
    assert "transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    status, headers, body = await running.ask(b"GET /version HTTP/1.0\r\n\r\n")
    assert (status, int(headers["content-length"])) == (200, len(body))


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


def parts_of(body: bytes) -> list[bytes]:
    """The chunks of a body, without the empty last one."""
    parts: list[bytes] = []
    while not body.startswith(b"0\r\n\r\n"):
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        assert body[len(parts[-1]) :][:2] == b"\r\n"
        body = body[len(parts[-1]) + 2 :]
    return parts


async def test_events_are_written_past_asgi_as_chunks_of_their_own(start: Start, monkeypatch: pytest.MonkeyPatch):
    written: list[bytes] = []
    write = uvicorn_protocol._ChunkWriter.write

    def write_and_note(self: Any, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(uvicorn_protocol._ChunkWriter, "write", write_and_note)
    running = await start()
    reader, writer = await running.send(post_bytes({"prompt": "Hello", "max_tokens": 12, "stream": True}))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    parts = parts_of(await reader.readuntil(b"0\r\n\r\n"))
    writer.close()
    assert parts[-1] == b"data: [DONE]\n\n"
    assert all(part.startswith(b"data: {") and part.endswith(b"\n\n") for part in parts[:-1])
    texts = [json.loads(part[6:])["choices"][0]["text"] for part in parts[:-1]]
    assert "".join(texts) == ("Hello" * 3)[:12]
    assert written == parts[1 : 1 + len(written)]
    assert len(written) >= 8
