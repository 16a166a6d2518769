"""Client of the OpenAI API, on the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator
from typing import Any

from llmstack_command.client.address import DEFAULT_PATH, Address
from llmstack_command.client.events import error_text, read_events
from llmstack_command.errors import ApiError

CONNECT_TIMEOUT_S = 10.0
# A request may wait in the server's queue, for minutes without any byte.
READ_TIMEOUT_S = 600.0
MAX_ANSWER_BYTES = 4 << 20


class ApiClient:
    """Sends one request at a time, each over its own connection."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self._address = address
        self._headers = {"Accept": "text/event-stream, application/json", "Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model_names(self) -> list[str]:
        """The names that `/v1/models` lists.

        Raises:
            ApiError: The server cannot be reached, refuses, or lists no model.
        """
        with self._request("GET", "/models") as response:
            listed = self._read_json(response)
        try:
            names = [str(model["id"]) for model in listed["data"]]
        except (TypeError, LookupError):
            names = []
        if not names:
            raise ApiError(f"{self._address}/models lists no model: is this a server of the OpenAI API?")
        return names

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of one streamed answer; ending the iteration early aborts the request on the server.

        Raises:
            ApiError: The server cannot be reached or refuses, or the request failed.
        """
        content = json.dumps({**body, "stream": True}).encode()
        with self._request("POST", route, content) as response:
            yield from read_events(response)

    def watch(self, route: str) -> Generator[dict[str, Any], None, None]:
        """The events of an endless stream beside the API, such as `/live/events`.

        Raises:
            ApiError: The server cannot be reached, refuses, or has ended.
        """
        with self._request("GET", route, is_beside=True) as response:
            yield from read_events(response)

    @contextlib.contextmanager
    def _request(
        self, method: str, route: str, content: bytes | None = None, *, is_beside: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        prefix = self._address.path.removesuffix(DEFAULT_PATH) if is_beside else self._address.path
        try:
            connection.request(method, prefix + route, content, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
            yield response
        except TimeoutError:
            raise ApiError(f"{self._address} has not answered for {READ_TIMEOUT_S:g} s") from None
        except (http.client.HTTPException, OSError) as error:
            raise ApiError(f"{self._address} closed the connection: {_reason(error)}") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        address = self._address
        kind = http.client.HTTPSConnection if address.is_https else http.client.HTTPConnection
        connection = kind(address.host, address.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(READ_TIMEOUT_S)
        except (OSError, UnicodeError) as error:
            connection.close()
            raise ApiError(self._connect_message(error)) from None
        return connection

    def _connect_message(self, error: OSError | UnicodeError) -> str:
        if isinstance(error, ConnectionRefusedError):
            return f"no server at {self._address}: start one with `llmstack serve`, or give another --url"
        if isinstance(error, (socket.gaierror, UnicodeError)):
            return f"--url: unknown host '{self._address.host}'"
        if isinstance(error, TimeoutError):
            return f"{self._address} cannot be reached: no connection within {CONNECT_TIMEOUT_S:g} s"
        if isinstance(error, ssl.SSLError):
            return f"{self._address}: no secure connection: {_reason(error)}"
        return f"{self._address} cannot be reached: {_reason(error)}"

    def _refusal(self, response: http.client.HTTPResponse) -> ApiError:
        message, code = error_text(self._read_json(response))
        if response.status == 401:
            return ApiError(f"{message or 'not allowed'} (--api-key, or LLMSTACK_API_KEY)", code)
        return ApiError(message or f"{self._address} answers with HTTP {response.status} {response.reason}", code)

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read(MAX_ANSWER_BYTES))
        except (ValueError, RecursionError):
            return None


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
