"""The route of realtime sessions."""

from __future__ import annotations

import time
from urllib.parse import parse_qs

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmstack_server.apis.realtime.sessions import Sessions
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, websocket_required
from llmstack_server.web.queue_gate import RECEIVED_S, QueueGate
from llmstack_server.web.routes import Content, Router, RouteSpec
from llmstack_server.web.websocket import SESSION_ID, can_open_websockets, websocket_of


class RealtimeResponse(Response):
    """The answer to a request that opens a session: status 101, and the session itself."""

    def __init__(self, state: ServerState, sessions: Sessions, gate: QueueGate) -> None:
        super().__init__()
        self._state = state
        self._sessions = sessions
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Opens the session if there is room for it, and runs it to its end; refusals are raised."""
        socket = websocket_of(scope)
        if socket is None:
            raise HTTPError(websocket_required(has_library=can_open_websockets()))
        from llmstack_server.apis.audio.prepare import speech_of  # late: most servers transcribe nothing
        from llmstack_server.apis.realtime.session import Session

        state, client = self._state, current_client.get()
        speech = await speech_of(state)
        (model,) = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[:1]
        adapter_of(state, model)
        received_s = scope["state"].get(RECEIVED_S, time.monotonic())
        self._gate.check(state.queue.sizes.estimate(None), client.tenant, received_s)
        headers: list[object] = []
        async with self._sessions.place(client.tenant):
            with state.in_flight.track() as cut:
                await send({"type": "http.response.start", "status": 101, "headers": headers})
                request_id, session_id = scope["state"]["request_id"], scope["state"].get(SESSION_ID)
                await Session(state, speech, socket, request_id, model, session_id).run(cut)
                await send({"type": "http.response.body", "body": b""})


def add_realtime_route(router: Router, state: ServerState) -> None:
    """Adds `/v1/realtime`, which OpenAPI has no words for."""
    sessions = Sessions(state.config.http.realtime, state.in_flight.tenant_to_sessions, state.peers)
    gate = QueueGate(state)

    @router.declare(RouteSpec("GET", "/v1/realtime", Content.EMPTY, tag="Audio", is_documented=False))
    async def realtime() -> Response:
        """Transcripts of sound that still comes, over a WebSocket."""
        return RealtimeResponse(state, sessions, gate)
