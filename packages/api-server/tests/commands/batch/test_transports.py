"""Requests to the application itself and to a server over HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llmstack_server.apis.batches.errors import BatchError
from llmstack_server.apis.batches.lines import BatchRequest
from llmstack_server.apis.batches.transport import AppTransport, TransportError
from llmstack_server.app import build_app
from llmstack_server.commands.batch.transports import HttpTransport
from llmstack_server.testing import FakeEngineClient, ready_state


def completion(**fields: Any) -> BatchRequest:
    content = json.dumps({"prompt": "abc", "max_tokens": 3, **fields}).encode()
    return BatchRequest(1, "a", "/v1/completions", content)


async def test_the_application_answers_as_the_server_does():
    engine = FakeEngineClient()
    transport = AppTransport(build_app(ready_state(engine)), engine.check_health)
    answer = await transport.send(completion())
    assert (answer.status, answer.body["choices"][0]["text"]) == (200, "abc")
    assert answer.request_id
    refused = await transport.send(completion(n=1000))
    assert (refused.status, refused.body["error"]["param"]) == (400, "n")
    unknown = await transport.send(BatchRequest(1, "a", "/v1/nothing?x=1", b"{}"))
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "unknown_url")


async def test_a_number_that_is_no_json_is_refused_by_the_application():
    engine = FakeEngineClient()
    answer = await AppTransport(build_app(ready_state(engine)), engine.check_health).send(
        completion(top_p=float("nan"))
    )
    assert answer.status == 400


async def test_a_dead_engine_ends_the_batch():
    engine = FakeEngineClient()
    transport = AppTransport(build_app(ready_state(engine)), engine.check_health)
    engine.is_dead = True
    with pytest.raises(BatchError, match="engine core has ended"):
        await transport.send(completion())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = {"path": self.path, "key": self.headers.get("authorization"), "body": body}
        content = b"<html>" if body.get("break") else json.dumps(said).encode()
        self.send_response(body.get("status", 200))
        self.send_header("content-length", str(len(content)))
        self.send_header("x-request-id", "r1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


async def test_a_server_is_asked_over_http(url: str):
    transport = HttpTransport(url + "/v1", "secret", 2)
    try:
        answer = await transport.send(completion())
        assert (answer.status, answer.request_id) == (200, "r1")
        assert (answer.body["path"], answer.body["key"]) == ("/v1/completions", "Bearer secret")
        refused = await transport.send(completion(status=400))
        assert refused.status == 400
        broken = await transport.send(completion(**{"break": True}))
        assert broken.body == "<html>"
    finally:
        transport.close()


async def test_a_server_that_is_not_there_is_a_failure_of_the_transport():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    transport = HttpTransport(f"http://127.0.0.1:{port}", None, 1)
    try:
        with pytest.raises(TransportError, match=str(port)):
            await transport.send(completion())
    finally:
        transport.close()


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://x:y", "http://x/other"])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(BatchError, match="--url"):
        HttpTransport(url, None, 1)
