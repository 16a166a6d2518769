"""A realtime session whose first event names its model, and not the address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.types import Scope, Send

from llmstack_server.apis.realtime.events import Events, new_id
from llmstack_server.apis.realtime.sessions import Sessions
from llmstack_server.apis.realtime.settings import DEFAULT_RATES, OPENAI, UPDATES, Settings, needs_update, read_update
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import decode_body
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, answer_to, missing_parameter, request_too_large, session_idle
from llmstack_server.web.websocket import SESSION_ID, WebSocket, WebSocketClosed

MAX_UNNAMED_S: Final = 60.0
"""How long a connection is open without a model; less where sessions may be silent for less."""
_UNNAMED: Final = "This server has several models: the first session.update has to name one."
_POLICY_VIOLATION, _TRY_AGAIN_LATER = 1008, 1013


async def open_unnamed(
    state: ServerState,
    socket: WebSocket,
    scope: Scope,
    send: Send,
    answer: Callable[[str], Awaitable[None]],
    check: Callable[[str], object],
) -> None:
    """Opens the connection, waits for a model that `check` takes, and has `answer` go on with it.

    The connection counts as a session of its key meanwhile. What goes wrong is an event, since there is no answer of
    HTTP any more.
    """
    http, request_id = state.config.http, scope["state"]["request_id"]
    sessions = Sessions(http.realtime, state.in_flight.tenant_to_sessions)
    scope["state"][SESSION_ID] = new_id("sess")
    events = Events(scope["state"][SESSION_ID], "")
    try:
        async with sessions.place(current_client.get().tenant):
            await send({"type": "http.response.start", "status": 101, "headers": []})
            await socket.send(events.created(Settings(OPENAI, DEFAULT_RATES[OPENAI])), http.send_timeout_s)
            name = await _read_name(state, socket, events, request_id, check)
        await answer(name)
    except WebSocketClosed:
        return
    except Exception as error:
        if not socket.is_open:
            raise
        found = answer_to(error, request_id)
        await socket.send(events.error(found, None), http.send_timeout_s)
        await socket.close(_TRY_AGAIN_LATER if found.status in (429, 503) else _POLICY_VIOLATION, found.code or "")


async def _read_name(
    state: ServerState, socket: WebSocket, events: Events, request_id: str, check: Callable[[str], object]
) -> str:
    """The model of the first event that names one, which the session then reads again.

    Raises:
        HTTPError: None came in time.
        WebSocketClosed: The client has left.
    """
    http = state.config.http
    limit_s = min(http.realtime.idle_timeout_s or MAX_UNNAMED_S, MAX_UNNAMED_S)
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await socket.receive()
                try:
                    if message.text is None:
                        raise HTTPError(request_too_large(http.max_body_bytes))
                    text = message.text.encode("utf-8", "replace")
                    name = _name_in(await decode_body(text, http.max_body_bytes, state.decoding))
                    check(name)
                except Exception as error:  # noqa: BLE001 (any error of one message, which the connection outlives)
                    await socket.send(events.error(answer_to(error, request_id), None), http.send_timeout_s)
                else:
                    socket.read_again(message)
                    return name
    except TimeoutError:
        raise HTTPError(session_idle(limit_s)) from None


def _name_in(event: Mapping[str, object]) -> str:
    if event.get("type") not in UPDATES:
        raise needs_update()
    name = read_update(event, None, None).model
    if name is None:
        raise missing_parameter("model", _UNNAMED)
    return name
