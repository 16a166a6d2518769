"""Control route that exchanges weights, settings or adapters while requests run."""

from __future__ import annotations

import asyncio
import logging

from fastapi import Request
from pydantic import BaseModel, ConfigDict, StrictStr
from starlette.responses import JSONResponse, Response

from llmstack_llm import EngineArgs, request_errors
from llmstack_llm.reloading import ReloadError
from llmstack_model_files import ModelFilesError
from llmstack_server.options.reload_options import ReloadEntry, engine_args_of
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Reloaded
from llmstack_server.web.body import read_object
from llmstack_server.web.errors import HTTPError, reload_failed
from llmstack_server.web.fields import parse
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Router, RouteSpec
from llmstack_types import LLMStackError

logger = logging.getLogger(__name__)


class ReloadRequest(BaseModel):
    """The fields of `/v1/reload`."""

    model_config = ConfigDict(extra="forbid")

    name: StrictStr
    running: StrictStr = "finish"


def add_reload_routes(router: Router, state: ServerState) -> None:
    """Adds `/v1/reload` where entries are configured."""
    if not state.config.reload.reload_models:
        return
    reloads = _Reloads(state)

    @router.declare(RouteSpec(
        "POST", "/v1/reload", Reloaded, body=RequestBody(ReloadRequest), statuses=(409,), is_for_operators=True
    ))  # fmt: skip
    async def reload(request: Request) -> Response:
        """Loads configured weights, settings or adapters; running requests finish with their own, or move."""
        fields = parse(ReloadRequest, await read_object(state, request))
        entries = state.config.reload.entries
        if fields.name not in entries:
            raise request_errors.invalid_value("name", f"expected one of {', '.join(entries)}")
        if fields.running not in ("finish", "move"):
            raise request_errors.invalid_value("running", "expected one of finish, move")
        return JSONResponse(await reloads.run(entries[fields.name], moves=fields.running == "move"))


class _Reloads:
    """One reload at a time, which its client's connection does not end."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._task: asyncio.Task[Reloaded] | None = None

    async def run(self, entry: ReloadEntry, *, moves: bool) -> Reloaded:
        """The answer, when the new engine core takes requests.

        Raises:
            HTTPError: 409; nothing has changed.
        """
        if self._task is not None and not self._task.done():
            raise HTTPError(reload_failed("another reload is running"))
        self._task = asyncio.create_task(self._reload(entry, moves=moves))
        return await asyncio.shield(self._task)

    async def _reload(self, entry: ReloadEntry, *, moves: bool) -> Reloaded:
        state = self._state
        try:
            for name, _ in entry.adapters or ():
                if name in state.config.served_model_names:
                    raise ReloadError(f"adapter {name} has the name of the served model")
            if state.shared_reloads is None:
                num_moved, num_finishing = await _reload_here(state, entry, moves=moves)
            else:
                num_moved, num_finishing = await state.shared_reloads.reload(entry.name, moves=moves)
        except LLMStackError as error:
            logger.error("no reload of %s: %s", entry.name, error)
            raise HTTPError(reload_failed(str(error))) from None
        logger.info("reloaded %s: %d requests finish in the engine core before", entry.name, num_finishing)
        return {
            "object": "reload",
            "name": entry.name,
            "weights": state.weights_object(),
            "num_finishing_requests": num_finishing,
            "num_moved_requests": num_moved,
        }


async def _reload_here(state: ServerState, entry: ReloadEntry, *, moves: bool) -> tuple[int, int]:
    """The numbers of requests that moved, and that finish where they are.

    Raises:
        ReloadError, EngineArgsError: Nothing has changed.
    """
    engine = state.engine
    args = None if entry.changes_adapters_alone else await asyncio.to_thread(_engine_args, state, entry)
    state.is_reloading = True
    try:
        ready, num_moved = await engine.reload(args, entry.adapters, moves=moves)
        if args is not None:
            state.follow_reload(entry.name, ready)
    finally:
        state.is_reloading = False
    return num_moved, engine.num_finishing_requests


def _engine_args(state: ServerState, entry: ReloadEntry) -> EngineArgs:
    """The options of the engine core to start.

    Raises:
        ReloadError: The model cannot be found.
        EngineArgsError: Its settings contradict each other.
    """
    first = "" if state.ready is None else state.ready.model_path
    try:
        return engine_args_of(entry, state.config.engine, state.start_model_path or first)
    except ModelFilesError as error:
        raise ReloadError(str(error)) from error
