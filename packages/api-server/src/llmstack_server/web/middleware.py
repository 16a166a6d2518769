"""ASGI middleware: request ids, errors, authentication, and readiness."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_server.observability.logs import current_request_id
from llmstack_server.options.secret import matching_index
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import ClientDisconnected, discard_body
from llmstack_server.web.clients import NO_CLIENT, Client, clients_of, current_client
from llmstack_server.web.errors import (
    ErrorAnswer,
    HTTPError,
    answer_to,
    engine_unavailable,
    invalid_api_key,
    missing_api_key,
    server_shutting_down,
)
from llmstack_server.web.keep_alive import PART_WRITER, PartWriter
from llmstack_server.web.origins import OriginGuard

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 128
# Probes of liveness and readiness have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
# Pages for people, which ask for the key themselves.
CHAT_PATH, LIVE_PATH = "/", "/live"
KEY_ASKING_PATHS = frozenset({CHAT_PATH, LIVE_PATH})
# Routes about the server itself, which are answered in every state of the engine.
UNGATED_PATHS = OPEN_PATHS | {
    CHAT_PATH, LIVE_PATH, "/metrics", "/version", "/load", "/server_info", "/openapi.json", "/docs", "/v1/models",
}  # fmt: skip
UNGATED_FOLDERS = ("/v1/models/", "/v1/responses/", "/v1/streams/", "/docs/")
# Routes that a sleeping engine can answer.
WAKING_PATHS = frozenset({
    "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/tokenize", "/detokenize", "/start_profile",
    "/stop_profile",
})  # fmt: skip
PAUSED_PATHS = WAKING_PATHS | {"/pause", "/resume", "/is_paused", "/abort_requests"}
CLIENT_CLOSED_REQUEST = 499


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and printable, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and len(given) <= MAX_REQUEST_ID_CHARS and all("!" <= char <= "~" for char in given):
        return given
    return uuid.uuid4().hex


def route_path(scope: Scope) -> str:
    """The path without the prefix of `--root-path`, whether or not the proxy has removed it."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    if prefix and path.startswith(f"{prefix}/"):
        return path[len(prefix) :]
    return path


class RequestContextMiddleware:
    """The outermost middleware: sets request ids, renders errors, and counts answers."""

    def __init__(self, app: ASGIApp, state: ServerState, routes: Sequence[BaseRoute] = ()) -> None:
        self._app = app
        self._state = state
        self._routes = routes
        self._patterns: dict[tuple[str, str], str] = {}  # of refused requests, by method and path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = time.monotonic()
        request_id = request_id_of(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        if self._state.config.http.root_path:
            scope["root_path"] = self._state.config.http.root_path
        current_request_id.set(request_id)
        sender = MarkingSender(send, REQUEST_ID_HEADER, request_id, scope["state"].get(PART_WRITER))
        try:
            try:
                await self._app(scope, receive, sender)
            except ClientDisconnected:
                sender.status = CLIENT_CLOSED_REQUEST
            except Exception as error:  # noqa: BLE001 (unexpected errors become an answer here)
                answer = answer_to(error, request_id)
                if not sender.has_started:
                    await send_error(answer, receive, sender)
        except asyncio.CancelledError:  # also of what sends an error
            if not self._state.lifecycle.is_stopping:
                raise
            if not sender.has_started:  # its body still comes, and the server waits for it no longer
                await send_error(server_shutting_down(), receive, sender)
        finally:
            self._count(scope, sender.status, start_s)

    def _count(self, scope: Scope, status: int, start_s: float) -> None:
        # The pattern of the route, not the path: clients must not be able to add series.
        route = scope["route"].path if "route" in scope else self._pattern(scope)
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._state.metrics.count_http(method, route, status, time.monotonic() - start_s)

    def _pattern(self, scope: Scope) -> str:
        """The pattern of the route that a refused request was for; `unknown` of routers that a custom one includes."""
        asked = scope["method"], route_path(scope)
        if asked in self._patterns:
            return self._patterns[asked]
        for route in self._routes:
            if route.matches(scope)[0] is Match.FULL:
                pattern: str = getattr(route, "path", "unknown")
                if pattern == asked[1]:  # there are as many of these as routes
                    self._patterns[asked] = pattern
                return pattern
        return "unknown"


class MarkingSender:
    """A `send` that adds a header and keeps the status and whether the answer has started."""

    def __init__(self, send: Send, header: str, value: str, part_writer: PartWriter | None) -> None:
        self._send = send
        self._header = header
        self._value = value
        self.part_writer = part_writer  # parts are passed on as they are
        self.has_started = False
        self.status = 0

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.has_started = True
            self.status = message["status"]
            MutableHeaders(raw=message["headers"])[self._header] = self._value
        return self._send(message)


async def send_error(answer: ErrorAnswer, receive: Receive, send: Send) -> None:
    """Sends one error; before a close the rest of the request is read, so that the client receives the error."""
    content = answer.encoded()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    is_unread = answer.status == 413
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": is_unread})
    if is_unread:
        try:
            await discard_body(receive)
        finally:
            await send({"type": "http.response.body", "body": b""})


class ErrorMiddleware:
    """Renders errors for outer middleware: custom middleware and CORS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        sender = MarkingSender(send, REQUEST_ID_HEADER, request_id, getattr(send, PART_WRITER, None))
        try:
            await self._app(scope, receive, sender)
        except ClientDisconnected:
            raise
        except Exception as error:  # rendered inside of CORS, so that pages can read the error
            if sender.has_started:
                raise
            await send_error(answer_to(error, request_id), receive, sender)


class AuthenticationMiddleware:
    """Requires an API key on every path except the open ones, and sets the current client. For servers with keys."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._keys = state.config.http.api_keys
        self._clients = clients_of(state.config)
        self._open_paths = OPEN_PATHS | ({"/metrics"} if state.config.http.has_open_metrics else set())
        self._asking_paths = KEY_ASKING_PATHS if state.config.http.has_chat_page else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = scope["state"].get("client") or NO_CLIENT
            is_known = "client" in scope["state"]  # a request of the server itself, such as of a batch
            if not is_known and route_path(scope) not in self._open_paths:
                headers = Headers(scope=scope)
                if route_path(scope) in self._asking_paths and not _has_key(headers):
                    scope["state"]["needs_key"] = True
                else:
                    index = self._key_index(headers)
                    scope["state"]["api_key_index"], client = index, self._clients[index]
            current_client.set(client)
        await self._app(scope, receive, send)

    def client_of(self, headers: Headers) -> Client:
        """The client whose key a request has.

        Raises:
            HTTPError: 401, it has none of the known ones.
        """
        return self._clients[self._key_index(headers)]

    def _key_index(self, headers: Headers) -> int:
        """The key of a request: a bearer token, or Anthropic's `x-api-key`."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = headers.get("x-api-key", "")
        if not key.strip():
            raise HTTPError(missing_api_key())
        index = matching_index(self._keys, key.strip().encode("latin-1", "replace"))
        if index is None:
            raise HTTPError(invalid_api_key())
        return index


def _has_key(headers: Headers) -> bool:
    return "authorization" in headers or "x-api-key" in headers


class GateMiddleware:
    """Refuses requests of foreign pages, and those that need the engine while it is not ready or asleep."""

    def __init__(self, app: ASGIApp, state: ServerState, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._state = state
        self._routes = routes
        self._guard = OriginGuard(state.config.http)
        processes = state.config.processes
        # The engine core of an attached server may be put to sleep by another one.
        self._can_sleep = processes.has_sleep_mode or processes.is_attached

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._guard.check(scope)
            path = route_path(scope)
            if path not in UNGATED_PATHS and not path.startswith(UNGATED_FOLDERS):
                refusal = self.refusal(path)
                # Path and method come first: what no route takes gets its 404 or 405 in every state.
                if refusal is not None and any(route.matches(scope)[0] is Match.FULL for route in self._routes):
                    raise HTTPError(refusal)
        await self._app(scope, receive, send)

    def refusal(self, path: str) -> ErrorAnswer | None:
        """The answer to requests of a path that needs the engine, while it cannot be used."""
        lifecycle = self._state.lifecycle
        if not lifecycle.is_ready:
            if lifecycle.is_stopping:
                return server_shutting_down()
            return engine_unavailable(f"The server is not ready yet: {lifecycle.state}.")
        if self._state.is_paused and path not in PAUSED_PATHS:
            return engine_unavailable("The server is paused: POST /resume ends that.")
        if self._can_sleep and self._state.engine.sleep_level and path not in WAKING_PATHS:
            return engine_unavailable("The engine is asleep: POST /wake_up wakes it.")
        return None


def health_body(answer: ErrorAnswer, status: str) -> dict[str, Any]:
    """The body of an unhealthy answer: the error and the lifecycle state."""
    return {"status": status, **answer.body()}
