"""Routes that give up sessions: their blocks are the first to be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import ReleasedSession
from llmstack_server.web.body import read_object
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, missing_parameter, session_not_found
from llmstack_server.web.openapi_bodies import FixedBody
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_server.web.sessions import MAX_NAME_CHARS, check_name
from llmstack_types import Control

_CLOSE_BODY = FixedBody({
    "type": "object",
    "properties": {"session_id": {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}},
    "required": ["session_id"],
})  # fmt: skip


def add_session_routes(
    router: Router, state: ServerState, models: Callable[[], Iterable[ServerState]] | None = None
) -> None:
    """Adds `DELETE /v1/sessions/{session_id}`, and SGLang's `/close_session`; a key gives up its own sessions.

    `models`: The models in memory that the current key may use, of a server with several.
    """

    async def release(name: str) -> Response:
        return await _release([state] if models is None else models(), name)

    @router.declare(RouteSpec("DELETE", "/v1/sessions/{session_id:path}", ReleasedSession, needs=Needs.ENGINE))
    async def delete_session(session_id: str) -> Response:
        """Gives up what was kept of a session of this key; what other sessions share stays."""
        return await release(session_id)

    @router.declare(RouteSpec("POST", "/close_session", ReleasedSession, body=_CLOSE_BODY, needs=Needs.ENGINE))
    async def close_session(request: Request) -> Response:
        """As `DELETE /v1/sessions/{session_id}`, with the name in the body."""
        body = await read_object(state, request)
        name = body.get("session_id")
        if name is None:
            raise missing_parameter("session_id")
        if not isinstance(name, str):
            raise request_errors.invalid_type("session_id", "a string", name)
        return await release(name)


async def _release(models: Iterable[ServerState], name: str) -> Response:
    check_name("session_id", name)
    if not name:  # this would name all sessions that have no name
        raise request_errors.empty_string("session_id")
    num_sessions = num_tokens = 0
    for model in models:
        found, forgotten = await model.engine.control(Control.RELEASE_SESSIONS, current_client.get().tenant, name)
        num_sessions, num_tokens = num_sessions + found, num_tokens + forgotten
    if not num_sessions:
        raise HTTPError(session_not_found())
    return JSONResponse({"id": name, "object": "session", "deleted": True, "released_tokens": num_tokens})
