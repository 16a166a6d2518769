"""A server of the OpenAI API small enough to misbehave as configured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

MODELS = {"data": [{"id": "first-model"}, {"id": "second-model"}]}


class FakeServer(ThreadingHTTPServer):
    """Repeats its input, word by word.

    Attributes:
        requests: Path, headers and decoded body of every POST.
        refusal: Status and body of every answer, in place of an answer.
        tail: What ends a stream; without `[DONE]` it breaks off.
        answers: What is said to a text, in place of the text itself.
        gate: Cleared, a stream stops after its first word until it is set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.refusal: tuple[int, Any] | None = None
        self.tail = b"data: [DONE]\n\n"
        self.models: Any = MODELS
        self.reasoning = ""
        self.answers: dict[str, str] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.has_lost_reader = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send_json(*(self.server.refusal or (200, self.server.models)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        if self.server.refusal is not None:
            self._send_json(*self.server.refusal)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for event in self._events(body):
                self._send_chunk(event)
            if self.server.tail:
                self._send_chunk(self.server.tail)
            self._send_chunk(b"")
        except OSError:
            self.server.has_lost_reader.set()

    def _events(self, body: dict[str, Any]) -> Iterator[bytes]:
        is_chat = "messages" in body
        said = body["messages"][-1]["content"] if is_chat else body["prompt"]
        said = self.server.answers.get(said, said)
        yield b": a comment\n\n"
        if self.server.reasoning:
            yield self._event({"delta": {"reasoning_content": self.server.reasoning}})
        for number, word in enumerate(said.split(" ")):
            if number:
                while not self.server.gate.wait(0.01):
                    yield b": still here\n\n"
                word = " " + word
            yield self._event({"delta": {"content": word}} if is_chat else {"text": word})
        yield self._event({"delta": {}, "finish_reason": "stop"})
        yield b'data: {"choices":[],"usage":{}}\n\n'

    def _event(self, choice: dict[str, Any]) -> bytes:
        return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send_json(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.gate.set()
    fake.shutdown()
    thread.join()
    fake.server_close()
