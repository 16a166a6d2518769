"""Control routes that record what the engine computes."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Status, StoppedProfile
from llmstack_server.web.errors import HTTPError, engine_unavailable
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types import Control


def add_profile_routes(router: Router, state: ServerState) -> None:
    """Adds `/start_profile` and `/stop_profile`."""

    @router.declare(RouteSpec("POST", "/start_profile", Status, needs=Needs.ENGINE, is_for_operators=True))
    async def start_profile() -> Response:
        """Begins to record what the engine computes, for the number of steps of `--profiler-config` at most."""
        problem = await state.engine.control(Control.START_PROFILE)
        if problem:
            raise HTTPError(engine_unavailable(problem))
        return JSONResponse({"status": "started"})

    @router.declare(RouteSpec("POST", "/stop_profile", StoppedProfile, needs=Needs.ENGINE, is_for_operators=True))
    async def stop_profile() -> Response:
        """Ends the profile; `traces` has the files that were written since the last call, on the engine's machine."""
        traces = await state.engine.control(Control.STOP_PROFILE)
        return JSONResponse({"status": "stopped", "traces": traces.splitlines()})
