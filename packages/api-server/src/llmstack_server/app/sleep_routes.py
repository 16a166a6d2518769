"""Control routes that free the memory of an idle model, and allocate it again."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import check_sleep_level
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Asleep
from llmstack_server.web.errors import HTTPError, engine_unavailable
from llmstack_server.web.routes import Content, Needs, Router, RouteSpec

# Other API processes read the sleep level again after this time; from then on all refuse requests.
SLEEP_QUESTION = "sleep_level"
_LEVELS = {"1": 1, "2": 2}
_ALL_TAGS = {"weights", "kv_cache"}


def add_sleep_routes(router: Router, state: ServerState) -> None:
    """Adds `/sleep`, `/wake_up` and `/is_sleeping`."""
    if state.peers is not None:
        state.peers.add_topic(SLEEP_QUESTION, lambda _: _sleep_level(state))

    level_query = {"level": ({"type": "integer", "enum": [1, 2], "default": 1}, "2 frees the weights too")}

    @router.declare(RouteSpec(
        "POST", "/sleep", Content.EMPTY, query=level_query, needs=Needs.ENGINE, is_for_operators=True
    ))  # fmt: skip
    async def sleep(request: Request) -> Response:
        """Frees the memory of the KV cache (`?level=1`), or of the weights too (`?level=2`)."""
        level = request.query_params.get("level", "1")
        if not await state.engine.sleep(check_sleep_level(_LEVELS.get(level))):
            raise HTTPError(engine_unavailable("The engine cannot sleep: requests are running."))
        _note_operator(state)
        await state.ask_peers(SLEEP_QUESTION)
        return Response(status_code=200)

    one_tag = {"type": "string", "enum": ["weights", "kv_cache"]}

    @router.declare(RouteSpec(
        "POST", "/wake_up", Content.EMPTY, needs=Needs.ENGINE, is_for_operators=True,
        query={"tags": ({"type": "array", "items": one_tag}, "what is restored")},
    ))  # fmt: skip
    async def wake_up(request: Request) -> Response:
        """Allocates again what `/sleep` has freed: all of it, or what `?tags=` names."""
        tags = set(request.query_params.getlist("tags"))
        level = await state.engine.current_sleep_level()
        if not tags <= _ALL_TAGS:
            raise request_errors.invalid_value("tags", f"expected one of {', '.join(sorted(_ALL_TAGS))}")
        if level > 1 and tags and tags != _ALL_TAGS:
            reason = "after level 2, weights and KV cache are restored together; give both tags or none"
            raise request_errors.unsupported_value("tags", reason)
        if tags == {"weights"}:
            return Response(status_code=200)  # level 1 has kept them
        await state.engine.wake_up()
        _note_operator(state)
        await state.ask_peers(SLEEP_QUESTION)
        return Response(status_code=200)

    @router.declare(RouteSpec("GET", "/is_sleeping", Asleep, needs=Needs.ENGINE, is_for_operators=True))
    async def is_sleeping() -> Response:
        """Whether the engine sleeps; `/wake_up` ends the sleep."""
        return JSONResponse({"is_sleeping": await state.engine.current_sleep_level() > 0})


def _note_operator(state: ServerState) -> None:
    """Notes that an operator has decided: no request wakes an engine that was put to sleep."""
    if state.idle is not None:
        state.idle.note_use()


async def _sleep_level(state: ServerState) -> int | None:
    return None if state.opened_engine is None else await state.engine.current_sleep_level()
