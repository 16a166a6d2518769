"""Readers of resumable streams that lose their connections after random bytes, over and over."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_BYTES = 3000
RETRY_S = 0.05
TIMEOUT_S = 60
EVENT = re.compile(rb"id: ([0-9a-f]{32})\.([0-9]+)\n(?:event: [^\n]*\n)?data: ([^\n]*)\n\n")
STATUS = re.compile(rb"HTTP/1.1 ([0-9]{3}) ")
LAST_EVENTS = ("[DONE]", '{"type":"message_stop"', '{"type":"response.completed"', '{"type":"response.incomplete"')
# Each character has two to four bytes, and many of them are several tokens.
TEXT = {"structured_outputs": {"regex": "[äöüéß日本語🙂🎈]{120,140}"}, "temperature": 1.0, "max_tokens": 400}
TURNS: list[Any] = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Route:
    """A route, the fields of its requests, and where the texts of its answers and events are."""

    path: str
    fields: dict[str, Any]
    text_of: Callable[[Any], str]
    delta_of: Callable[[Any], str]

    def body(self, seed: int, **fields: Any) -> dict[str, Any]:
        return TEXT | self.fields | {"seed": seed} | fields


def _delta_of_choice(event: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


ROUTES = {
    "completions": Route(
        "/v1/completions",
        {"prompt": "Once upon a time"},
        lambda answer: str(answer["choices"][0]["text"]),
        lambda event: "".join(choice["text"] for choice in event["choices"]),
    ),
    "chat": Route(
        "/v1/chat/completions",
        {"messages": TURNS},
        lambda answer: str(answer["choices"][0]["message"]["content"]),
        _delta_of_choice,
    ),
    "messages": Route(
        "/v1/messages",
        {"model": "llmstack-demo", "messages": TURNS},
        lambda answer: str(answer["content"][0]["text"]),
        lambda event: str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else "",
    ),
    "responses": Route(
        "/v1/responses",
        {"input": "Tell me a story.", "max_output_tokens": 400, "max_tokens": None},
        lambda answer: str(answer["output"][0]["content"][0]["text"]),
        lambda event: str(event["delta"]) if event["type"] == "response.output_text.delta" else "",
    ),
}


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    headers = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def body_of(answer: bytes) -> bytes:
    """The body as far as it has come, without the lengths of its chunks."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        length, mark, rest = rest.partition(b"\r\n")
        if not mark or int(length, 16) == 0:
            break
        body, rest = body + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    return body


@dataclass
class CutReader:
    """Reads one stream to its end, over connections that it loses.

    Attributes:
        may_be_away: Whether the server may refuse connections and requests for some time.
        num_cuts: Connections that were lost so far.
        num_away: Connections that got no answer, or 503.
        fingerprint: Of the weights that the events name; empty where they name none.
    """

    port: int
    route: Route
    body: bytes
    key: str
    drawn: random.Random
    may_be_away: bool = False
    last_id: str = ""
    text: str = ""
    fingerprint: str = ""
    events: list[bytes] = field(default_factory=list)
    num_cuts: int = 0
    num_away: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    def read_all(self, on_cut: Callable[[], None] = lambda: None) -> str:
        """The text. `on_cut`: Called after each lost connection."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._read_some():
            assert time.monotonic() < deadline, f"{len(self.events)} events of {self.last_id}"
            self.num_cuts += 1
            on_cut()
        return self.text

    def close(self) -> None:
        """Closes the connections that were left open."""
        while self._open:
            self._open.pop().close()

    def whole(self) -> list[bytes]:
        """The data of all events, read over one connection."""
        answer = self._exchange(request("GET", f"/v1/streams/{self.last_id.partition('.')[0]}?after=0", {}), 1 << 30)
        return [data for _, _, data in EVENT.findall(body_of(answer))]

    def _read_some(self) -> bool:
        """Reads events over one connection; whether the last one has come."""
        answer = self._exchange(self._message(), self.drawn.randrange(1, MAX_BYTES))
        found = STATUS.match(answer)
        if found is None or found.group(1) == b"503":
            is_cut = found is None and answer  # within the first line
            assert self.may_be_away or is_cut or not answer, answer
            self.num_away += not is_cut
            time.sleep(0 if is_cut else RETRY_S)
            return False
        assert found.group(1) == b"200", answer
        for stream_id, number, data in EVENT.findall(body_of(answer)):
            assert int(number) == len(self.events) + 1
            assert not self.last_id or self.last_id.startswith(stream_id.decode())
            self.last_id = f"{stream_id.decode()}.{int(number)}"
            self.events.append(data)
            if data.decode().startswith(LAST_EVENTS):
                return True
            assert not data.startswith(b'{"error"'), data
            event = json.loads(data)
            self.text += self.route.delta_of(event)
            self.fingerprint = event.get("system_fingerprint", self.fingerprint)
        return False

    def _message(self) -> bytes:
        if self.last_id and self.drawn.random() < 0.5:
            stream_id, _, after = self.last_id.partition(".")
            if self.drawn.random() < 0.5:
                return request("GET", f"/v1/streams/{stream_id}?after={after}", {})
            return request("GET", f"/v1/streams/{stream_id}", {"Last-Event-ID": self.last_id})
        headers = {"Content-Type": "application/json", "Idempotency-Key": self.key}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        return request("POST", self.route.path, headers, self.body)

    def _exchange(self, message: bytes, limit: int) -> bytes:
        """The first bytes of the answer. The connection is closed, reset, or left open without a reader."""
        received, how = bytearray(), self.drawn.random()
        try:
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        except ConnectionError:
            return b""
        try:
            if how < 0.1 and limit < MAX_BYTES:  # within the request
                connection.sendall(message[: self.drawn.randrange(len(message))])
            else:
                connection.sendall(message)
                while len(received) < limit and (some := connection.recv(limit - len(received))):
                    received += some
        except ConnectionError:
            pass
        if how > 0.9:
            self._open.append(connection)
        else:
            if how > 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        if len(self._open) > 4:
            self.close()
        return bytes(received)
