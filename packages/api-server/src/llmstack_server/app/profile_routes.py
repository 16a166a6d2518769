"""Control routes that record what the engine computes."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import HTTPError, engine_unavailable


def add_profile_routes(router: APIRouter, state: ServerState) -> None:
    """Adds `/start_profile` and `/stop_profile`."""

    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Begins to record what the engine computes, for the number of steps of `--profiler-config` at most."""
        problem = await state.engine.start_profile()
        if problem:
            raise HTTPError(engine_unavailable(problem))
        return JSONResponse({"status": "started"})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Ends the profile; `traces` has the files that were written since the last call, on the engine's machine."""
        return JSONResponse({"status": "stopped", "traces": await state.engine.stop_profile()})
