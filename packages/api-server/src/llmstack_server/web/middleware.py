"""ASGI middleware: request ids, errors, authentication, and readiness."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_server.observability.logs import current_request_id
from llmstack_server.options.secret import matching_index
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import ClientDisconnected, discard_body
from llmstack_server.web.clients import NO_CLIENT, Client, clients_of, current_client
from llmstack_server.web.error_forms import ERROR_FORM, ErrorForm
from llmstack_server.web.errors import (
    ErrorAnswer,
    HTTPError,
    answer_to,
    invalid_api_key,
    missing_api_key,
    server_shutting_down,
)
from llmstack_server.web.keep_alive import PART_WRITER, PartWriter
from llmstack_server.web.routes import Key, RouteTable, route_path
from llmstack_server.web.websocket import opening_request

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 128
CLIENT_CLOSED_REQUEST = 499


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and printable, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    if given and len(given) <= MAX_REQUEST_ID_CHARS and all("!" <= char <= "~" for char in given):
        return given
    return uuid.uuid4().hex


class RequestContextMiddleware:
    """The outermost middleware: sets request ids, renders errors, and counts answers."""

    def __init__(self, app: ASGIApp, state: ServerState, table: RouteTable) -> None:
        self._app = app
        self._state = state
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] != "websocket":
                await self._app(scope, receive, send)
                return
            scope, receive, send = opening_request(scope, receive, send)
        start_s = time.monotonic()
        request_id = request_id_of(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        if self._state.config.http.root_path:
            scope["root_path"] = self._state.config.http.root_path
        current_request_id.set(request_id)
        path = route_path(scope)
        form = scope["state"][ERROR_FORM] = self._table.path_to_form.get(path) or self._table.errors_of(path)
        sender = MarkingSender(send, form, request_id, scope["state"].get(PART_WRITER))
        try:
            try:
                await self._app(scope, receive, sender)
            except ClientDisconnected:
                sender.status = CLIENT_CLOSED_REQUEST
            except Exception as error:  # noqa: BLE001 (unexpected errors become an answer here)
                answer = answer_to(error, request_id)
                if not sender.has_started:
                    await send_error(form.answer(answer, request_id), receive, sender)
        except asyncio.CancelledError:  # also of what sends an error
            if not self._state.lifecycle.is_stopping:
                raise
            if not sender.has_started:  # its body still comes, and the server waits for it no longer
                await send_error(form.answer(server_shutting_down(), request_id), receive, sender)
        finally:
            # The pattern of the route, not the path: clients must not be able to add series. `unknown` is what no route
            # takes, and what is refused of routers that a custom one includes.
            route = scope["route"] if "route" in scope else self._table.find(scope)
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            pattern, seconds = getattr(route, "path", "unknown"), time.monotonic() - start_s
            self._state.metrics.count_http(method, pattern, sender.status, seconds)


@dataclass(eq=False)
class MarkingSender:
    """A `send` that adds the id of the request, and keeps the status and whether the answer has started."""

    send: Send
    form: ErrorForm
    request_id: str
    part_writer: PartWriter | None  # parts are passed on as they are
    has_started: bool = False
    status: int = 0

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.has_started = True
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            headers[REQUEST_ID_HEADER] = self.request_id
            for name in self.form.id_headers:
                headers[name] = self.request_id
        return self.send(message)


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
        request_id, form = scope["state"]["request_id"], scope["state"][ERROR_FORM]
        sender = MarkingSender(send, form, request_id, getattr(send, PART_WRITER, None))
        try:
            await self._app(scope, receive, sender)
        except ClientDisconnected:
            raise
        except Exception as error:  # rendered inside of CORS, so that pages can read the error
            if sender.has_started:
                raise
            await send_error(form.answer(answer_to(error, request_id), request_id), receive, sender)


class AuthenticationMiddleware:
    """Requires an API key on every route but those that use none, and sets the current client, where there are keys."""

    def __init__(self, app: ASGIApp, state: ServerState, table: RouteTable) -> None:
        self._app = app
        self._keys = state.config.http.api_keys
        self._clients = clients_of(state.config)
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = scope["state"].get("client") or NO_CLIENT
            is_known = "client" in scope["state"]  # a request of the server itself, such as of a batch
            key = self._table.key_of(route_path(scope))
            if not is_known and key is not Key.UNUSED:
                headers = Headers(scope=scope)
                if key is Key.ASKED_BY_PAGE and not _has_key(headers):
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


def health_body(answer: ErrorAnswer, status: str) -> dict[str, object]:
    """The body of an unhealthy answer: the error and the lifecycle state."""
    return {"status": status, **answer.body()}
