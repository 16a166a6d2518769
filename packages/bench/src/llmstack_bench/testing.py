"""A small OpenAI-like server for tests of clients.

It can imitate the deviations of real servers: no usage, several tokens per chunk, errors, broken streams.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a `FakeServer` answers.

    Attributes:
        status: Any other than 200 sends an error in OpenAI's form.
        tokens_per_chunk: The last chunk may have fewer.
        has_usage: Sends a chunk with usage if requested.
        has_continuous_usage: Sends usage with every chunk.
        breaks_after: Closes the connection after that many chunks.
        error_after: Sends an error in place of the chunk after that many.
        token_delay_s: Waits before every chunk.
        lists_models: Answers `/v1/models`.
        predicted_ttft_ms: The header with the predicted time to the first token; None sends none.
    """

    status: int = 200
    tokens_per_chunk: int = 1
    has_usage: bool = True
    has_continuous_usage: bool = False
    breaks_after: int | None = None
    error_after: int | None = None
    token_delay_s: float = 0.0
    lists_models: bool = True
    predicted_ttft_ms: str | None = None


@dataclass(slots=True)
class FakeServer:
    """A context manager: serves on a free port of the loopback interface, in threads of this process.

    Attributes:
        bodies: Bodies of all completion requests so far, in order of arrival.
        paths: Paths of all POST requests so far.
        headers: Headers of all POST requests so far, with lower-case names.
        url: Where it listens, while the context is open.
    """

    behaviour: Behaviour = field(default_factory=Behaviour)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    _server: ThreadingHTTPServer | None = None
    _thread: threading.Thread | None = None

    def __enter__(self) -> FakeServer:
        fake = self

        class Handler(_Handler):
            behaviour, bodies, paths, sent_headers = fake.behaviour, fake.bodies, fake.paths, fake.headers

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour
    bodies: list[dict[str, Any]]
    paths: ClassVar[list[str]] = []
    sent_headers: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.behaviour.lists_models:
            self._answer(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif self.path == "/health":
            self._answer(200, {})
        else:
            self._answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        self.sent_headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.path in ("/start_profile", "/stop_profile"):
            self._answer(self.behaviour.status, {})
            return
        body = json.loads(content)
        self.bodies.append(body)
        if self.behaviour.status != 200:
            self._answer(self.behaviour.status, {"error": {"message": "configured to refuse"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if self.behaviour.predicted_ttft_ms is not None:
            self.send_header("x-llmstack-predicted-ttft-ms", self.behaviour.predicted_ttft_ms)
        self.end_headers()
        for event in _events(body, self.behaviour, is_chat=self.path.endswith("chat/completions")):
            self.wfile.write(b"data: " + event + b"\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the log of `http.server`."""

    def _answer(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _events(body: dict[str, Any], behaviour: Behaviour, *, is_chat: bool) -> Iterator[bytes]:
    num_left, num_sent, number = int(body["max_tokens"]), 0, 0
    if is_chat:
        yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    while num_left:
        if number == behaviour.breaks_after:
            return
        if number == behaviour.error_after:
            yield _event({"error": {"message": "configured to fail"}})
            return
        time.sleep(behaviour.token_delay_s)
        num_new = min(behaviour.tokens_per_chunk, num_left)
        num_left, num_sent, number = num_left - num_new, num_sent + num_new, number + 1
        text = {"delta": {"content": "x " * num_new}} if is_chat else {"text": "x " * num_new}
        choice = {"index": 0, **text, "finish_reason": None if num_left else "length"}
        usage = {"usage": _usage(body, num_sent)} if behaviour.has_continuous_usage else {}
        yield _event({"choices": [choice], **usage})
    if behaviour.has_usage and body.get("stream_options", {}).get("include_usage"):
        yield _event({"choices": [], "usage": _usage(body, num_sent)})
    yield b"[DONE]"


def _usage(body: dict[str, Any], num_output_tokens: int) -> dict[str, int]:
    prompt = body["messages"] if "messages" in body else body["prompt"]
    num_prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}


def _event(data: dict[str, Any]) -> bytes:
    return json.dumps(data).encode()
