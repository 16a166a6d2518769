"""A realtime session as a client without a library for it has one: a socket, and wsproto's other side."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, Ping, RejectConnection, RejectData, Request

TIMEOUT_S = 120.0


class SocketSession:
    """One connection; a context manager.

    Attributes:
        status: Of the answer: 101 once it is open.
        close_code: With which the server has closed it.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, path: str = "/v1/realtime") -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), TIMEOUT_S)
        self._connection = WSConnection(ConnectionType.CLIENT)
        self._events: list[dict[str, Any]] = []
        self._text = ""
        self.status, self.close_code = 0, 0
        extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._send(Request(host=f"{place.hostname}:{place.port}", target=path, extra_headers=extra))
        while not self.status:
            self._read()

    def __enter__(self) -> SocketSession:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def tell(self, event: Mapping[str, Any]) -> None:
        """Sends an event."""
        self._send(Message(data=json.dumps(event)))

    def add(self, data: bytes) -> None:
        """Sends sound."""
        self.tell({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})

    def next(self) -> dict[str, Any]:
        """The next event; an empty one where the server has closed the connection."""
        while not self._events:
            if self.close_code:
                return {}
            self._read()
        return self._events.pop(0)

    def until(self, kind: str, seen: Callable[[dict[str, Any]], None] = lambda event: None) -> list[dict[str, Any]]:
        """The events up to the first one whose type ends so; `seen` gets each as it comes."""
        events: list[dict[str, Any]] = []
        while not events or (events[-1] and not events[-1]["type"].endswith(kind)):
            events.append(self.next())
            seen(events[-1])
        return events

    def _send(self, event: Any) -> None:
        self._socket.sendall(self._connection.send(event))

    def _read(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            self.close_code = self.close_code or 1006
            self.status = self.status or -1
            return
        self._connection.receive_data(data)
        for event in self._connection.events():
            if isinstance(event, AcceptConnection):
                self.status = 101
            elif isinstance(event, RejectConnection):
                self.status = event.status_code
            elif isinstance(event, Message):
                self._text += str(event.data)
                if event.message_finished:
                    self._events.append(json.loads(self._text))
                    self._text = ""
            elif isinstance(event, Ping):
                self._send(event.response())
            elif isinstance(event, CloseConnection):
                self.close_code = int(event.code)
            else:
                assert isinstance(event, RejectData), event
