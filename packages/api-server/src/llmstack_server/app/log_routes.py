"""Control route that sets the level of the log while the server runs."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Status
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types import Control
from llmstack_types.log_lines import LOG_LEVELS, set_log_level

LOG_TOPIC = "log_level"


def add_log_routes(router: Router, state: ServerState) -> None:
    """Adds `/log_level`, which other API processes follow."""
    if state.peers is not None:
        state.peers.add_topic(LOG_TOPIC, _set_here)

    @router.declare(RouteSpec(
        "POST", "/log_level", Status, needs=Needs.ENGINE, is_for_operators=True,
        query={"level": ({"type": "string", "enum": [*LOG_LEVELS]}, "the least level that is written")},
    ))  # fmt: skip
    async def log_level(request: Request) -> Response:
        """Sets the level of the log in all processes; those that start later have the first one again."""
        level = request.query_params.get("level", "")
        if level not in LOG_LEVELS:
            raise request_errors.invalid_value("level", f"expected one of {', '.join(LOG_LEVELS)}")
        await _set_here(level)
        await state.ask_peers(f"{LOG_TOPIC} {level}")
        await state.engine.control(Control.SET_LOG_LEVEL, level)
        return JSONResponse({"status": level})


async def _set_here(level: str) -> bool:
    return set_log_level(level)
