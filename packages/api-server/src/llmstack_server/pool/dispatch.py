"""The way of a request to the model that it names, once that is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qs, parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_llm import request_errors
from llmstack_server.pool.model_pool import ModelPool
from llmstack_server.pool.pooled_model import PooledModel
from llmstack_server.pool.read_ahead import ReadAhead
from llmstack_server.state.request_sizes import LARGE_BYTES
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import run_until, run_while_connected
from llmstack_server.web.body import BodyLimits, ClientDisconnected, check_media_type, decode_body, read_body
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import waited_s
from llmstack_server.web.errors import (
    HTTPError,
    client_deadline_exceeded,
    missing_parameter,
    model_not_found,
    model_unavailable,
    request_not_found,
    request_timeout,
)
from llmstack_server.web.form_type import MEDIA_TYPE
from llmstack_server.web.queue_gate import DEADLINE_HEADER, RECEIVED_S, content_length, read_deadline
from llmstack_server.web.restarts import Replay
from llmstack_server.web.resumable import LAST_EVENT_HEADER
from llmstack_server.web.routes import Needs, RouteSpec
from llmstack_server.web.websocket import WebSocket, websocket_of
from llmstack_types import ServerOverloadedError

LATEST: Final = ":latest"
MAX_FORM_START_BYTES: Final = 64 << 10
"""A form names its model within so many bytes: what comes before the file."""
MAX_AHEAD_BYTES: Final = 32 << 20
"""So much of the body of one request is read while its model is loaded."""
_MAX_DEADLINE_MS: Final = 10**9
# Headers are matched possessively and few of them: a form of nothing but such lines costs one pass.
_FORM_MODEL: Final = re.compile(
    rb'[;\s]name="?model"?\r\n(?:[^\r\n]{1,256}+\r\n){0,4}+\r\n([^\r\n]{1,256})\r\n', re.IGNORECASE
)
_MAX_FORM_MODEL_BYTES: Final = 2048
"""The longest match of it."""
_NO_MODEL: Final = "This server has several models: 'model' has to name one of them, as a field or as `?model=`."


class ModelResponse(Response):
    """The answer of the model that a request names; the request waits until the model is loaded."""

    def __init__(self, pool: ModelPool, state: ServerState, spec: RouteSpec) -> None:
        """`state`: That of the server before all models."""
        super().__init__()
        self._pool = pool
        self._state = state
        self._spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on with its body; errors before the first byte are raised."""
        spec = self._spec
        if "{" in spec.path:
            await self._ask_each(scope, receive, send)
            return
        socket = websocket_of(scope)
        if socket is not None and not is_named(scope):
            await self._open_unnamed(socket, scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _open_unnamed(self, socket: WebSocket, scope: Scope, receive: Receive, send: Send) -> None:
        """Opens a session whose first event names its model."""
        from llmstack_server.pool.unnamed_session import open_unnamed  # late: most servers transcribe nothing

        async def answer(name: str) -> None:
            query = urlencode([*parse_qsl(scope["query_string"].decode("latin-1")), ("model", name)])
            await self._answer({**scope, "query_string": query.encode()}, receive, send)

        await open_unnamed(self._state, socket, scope, send, answer, lambda name: model_of(self._pool, name))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        spec = self._spec
        named = await self._read_model(scope, receive)
        model = model_of(self._pool, named.name)
        inner = {**scope}  # what the application of the model notes there is not that of this one
        if spec.needs is Needs.NOTHING:
            await model.host.app(inner, named.receive, send)
            return
        asks_engine = spec.is_for_operators or (spec.needs is Needs.ENGINE and spec.body is None)
        if asks_engine and not model.is_loaded:
            raise HTTPError(model_unavailable(f"The model {model.name} is not loaded.", 1.0))
        # What goes on with an answer that there is needs no engine.
        is_resumed = spec.is_resumable and LAST_EVENT_HEADER in Headers(scope=scope)
        needs_awake = spec.needs > Needs.ENGINE and not is_resumed
        with model.used():
            if model.is_loaded and not (needs_awake and model.is_asleep):
                await model.host.app(inner, named.receive, send)
                return
            began_s = time.monotonic()
            named = await self._wait(model, scope, receive, named, needs_awake=needs_awake)
            scope["state"][RECEIVED_S] = time.monotonic()
            waited = waited_s.set(time.monotonic() - began_s)
            try:
                await model.host.app(inner, named.receive, send)
            finally:
                waited_s.reset(waited)

    async def _ask_each(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request about an answer, whose id tells no model: the one that has it answers."""
        missing = HTTPError(request_not_found())
        for model in visible_models(self._pool):
            if self._spec.needs is not Needs.NOTHING and not model.is_loaded:
                continue  # what an engine has known has ended with it
            try:
                await model.host.app({**scope}, receive, send)
            except HTTPError as error:
                if error.answer.code != "not_found":
                    raise
                missing = error
            else:
                return
        raise missing

    async def _wait(
        self, model: PooledModel, scope: Scope, receive: Receive, named: NamedRequest, *, needs_awake: bool
    ) -> NamedRequest:
        """Waits for the model as one of its queue; the request is in flight meanwhile. Returns the request.

        Raises:
            HTTPError: 408, its client's deadline has passed; 429 or 503, the model cannot be loaded now.
            ServerOverloadedError: Too many requests wait for it.
            ClientDisconnected: The client has left.
        """
        headers, tenant = Headers(scope=scope), current_client.get().tenant
        limits = [limit for limit in (named.deadline_s, _deadline_of(headers)) if limit is not None]
        num_bytes = content_length(headers, of_text=True) if named.num_bytes is None else named.num_bytes
        # A large body may be a picture, which only a model that is loaded tells.
        num_tokens = model.host.state.queue.sizes.estimate(num_bytes and min(num_bytes, LARGE_BYTES))
        loading = (self._pool.wait_until_awake if needs_awake else self._pool.wait_until_loaded)(model, tenant)
        try:
            with model.waiting.place(tenant, num_tokens), self._state.in_flight.track() as cut:
                async with asyncio.timeout(min(limits, default=None)):
                    if named.num_bytes is not None:
                        with self._pool.held.place(tenant, named.num_bytes):
                            await run_while_connected(loading, receive, cut)
                        return named
                    return await self._wait_reading(loading, scope, named, cut)
        except TimeoutError:
            raise HTTPError(client_deadline_exceeded(min(limits))) from None
        finally:
            loading.close()

    async def _wait_reading(
        self, loading: Coroutine[object, object, None], scope: Scope, named: NamedRequest, cut: asyncio.Future[None]
    ) -> NamedRequest:
        """Waits while what is left of the body is read, for the model: so the end of the client is noticed."""
        length = content_length(Headers(scope=scope))
        max_bytes = MAX_AHEAD_BYTES if length is None else min(length, MAX_AHEAD_BYTES)
        socket, body = websocket_of(scope), ReadAhead(named.receive)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._pool.read_ahead.place(current_client.get().tenant, max_bytes))
            except ServerOverloadedError:  # the end of this client is noticed once the model is there
                max_bytes = -1
            gone = body.read_until_gone(max_bytes) if socket is None else socket.wait_until_closed()
            leaving = asyncio.create_task(gone)
            try:
                await run_until(loading, leaving, cut)
            finally:
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
        return named._replace(receive=body)

    async def _read_model(self, scope: Scope, receive: Receive) -> NamedRequest:
        """The model that a request names in its query, form or JSON, and a `receive` that repeats the body."""
        (name,) = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[:1]
        if name is not None:
            return NamedRequest(name, receive)
        headers, http = Headers(scope=scope), self._state.config.http
        if self._spec.body is None:
            raise missing_parameter("model", _NO_MODEL)
        if MEDIA_TYPE in headers.get("content-type", "").lower():
            return await _read_form(receive, http.receive_timeout_s)
        check_media_type(headers, takes_untyped=self._spec.takes_untyped)
        with self._pool.reading.place(current_client.get().tenant, 0) as add:
            # What has come counts, and not what is declared: who sends nothing keeps no room from others.
            counted, limits = _counted(receive, add), BodyLimits(http.max_body_bytes, http.receive_timeout_s)
            body = bytes(await read_body(headers, counted, limits))
            fields = await decode_body(body, http.max_body_bytes, self._state.decoding)
        value = fields.get("model", fields.get("name") if self._spec.path == "/api/show" else None)
        if value is None:
            raise missing_parameter("model", _NO_MODEL)
        if not isinstance(value, str):
            raise request_errors.invalid_type("model", "a string", value)
        return NamedRequest(value, Replay(body, receive), len(body), deadline_s=_deadline_in(fields))


def is_named(scope: Scope) -> bool:
    """Whether the address of a request names a model."""
    return "model" in parse_qs(scope["query_string"].decode("latin-1"))


class NamedModel:
    """The application before all models, for requests that the server sends itself: they name this model."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._query = urlencode({"model": name}).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        await self._app({**scope, "query_string": self._query}, receive, send)


class NamedRequest(NamedTuple):
    """A request whose model is known.

    Attributes:
        receive: Has the whole body, also what was read of it.
        num_bytes: Of the body, where nothing is left of it.
        deadline_s: The deadline in its fields.
    """

    name: str
    receive: Receive
    num_bytes: int | None = None
    deadline_s: float | None = None


def visible_models(pool: ModelPool) -> list[PooledModel]:
    """The models that the key of the current request may use."""
    allowed = current_client.get().models
    return [model for model in pool.models if allowed is None or model.name in allowed]


def model_of(pool: ModelPool, name: str) -> PooledModel:
    """The model that the current request means; one that its key may not use does not exist for it.

    Raises:
        InvalidRequestError: Code `model_not_found`.
    """
    found = pool.find(name) or (pool.find(name.removesuffix(LATEST)) if name.endswith(LATEST) else None)
    visible = visible_models(pool)
    if found is None or found not in visible:
        raise model_not_found(name, ", ".join(f"`{one.name}`" for one in visible[:8]) or "none")
    return found


def _counted(receive: Receive, add: Callable[[int], None]) -> Receive:
    """Passes on the messages of `receive`, and adds up their bytes as they come."""

    async def receive_counted() -> Message:
        message = await receive()
        add(len(message.get("body", b"")))
        return message

    return receive_counted


async def _read_form(receive: Receive, timeout_s: float) -> NamedRequest:
    """Reads a form until it has named its model."""
    messages: list[Message] = []
    start, match, has_more = bytearray(), None, True
    try:
        async with asyncio.timeout(timeout_s):
            while match is None and has_more and len(start) <= MAX_FORM_START_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                messages.append(message)
                num_searched = max(len(start) - _MAX_FORM_MODEL_BYTES, 0)
                start += message.get("body", b"")
                match = _FORM_MODEL.search(start, num_searched)
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise HTTPError(request_timeout()) from None
    if match is None:
        raise missing_parameter("model", f"{_NO_MODEL} In a form it has to come before the file.")
    return NamedRequest(match[1].decode("utf-8", "replace"), ReadAhead(receive, messages))


def _deadline_in(fields: Mapping[str, object]) -> float | None:
    """The deadline of a body; one of another form is for the model's route to refuse."""
    given = fields.get("deadline_ms")
    return given / 1000 if type(given) is int and 0 < given < _MAX_DEADLINE_MS else None


def _deadline_of(headers: Mapping[str, str]) -> float | None:
    return read_deadline(headers[DEADLINE_HEADER]) if DEADLINE_HEADER in headers else None
