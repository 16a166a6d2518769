"""Control routes that pause a server between requests, and end requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Aborted, Paused, Status
from llmstack_server.web.body import read_object
from llmstack_server.web.errors import HTTPError, engine_unavailable
from llmstack_server.web.openapi_bodies import FixedBody
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types import Control

PAUSE_TOPIC = "pause"
ABORT_TOPIC = "abort"
MAX_PAUSE_WAIT_S = 600.0
MAX_NUM_ABORTED_IDS = 1024
MAX_ID_CHARS = 256
_POLL_S = 0.02
# What the server adds to the id of an answer: 128 random bits, and the index of a prompt.
_ENDING = re.compile(r"(-[0-9a-f]{32})?(-[0-9]+)?")
_EVERYTHING = "*"
_ID = {"type": "string", "pattern": "^[!-~]+$", "maxLength": MAX_ID_CHARS}
_IDS = {"anyOf": [{"type": "array", "items": _ID, "maxItems": MAX_NUM_ABORTED_IDS}, {"type": "null"}]}
_ABORT_BODY = FixedBody({"type": "object", "properties": {"request_ids": _IDS}})


def add_pause_routes(router: Router, state: ServerState) -> None:
    """Adds `/pause`, `/resume`, `/is_paused` and `/abort_requests`."""
    if state.peers is not None:
        state.peers.add_topic(PAUSE_TOPIC, lambda word: _set_paused(state, word))
        state.peers.add_topic(ABORT_TOPIC, lambda request_id: _abort(state, request_id))

    @router.declare(RouteSpec(
        "POST", "/pause", Status, needs=Needs.AWAKE, is_for_operators=True,
        query={
            "mode": ({"type": "string", "enum": ["abort", "wait"], "default": "abort"}, "what running requests do"),
            "clear_cache": ({"type": "boolean", "default": True}, "whether the prefix cache is emptied"),
        },
    ))  # fmt: skip
    async def pause(request: Request) -> Response:
        """Refuses new requests until `/resume`; running ones end at once, or first with `?mode=wait`."""
        mode, clears_cache = _pause_query(request.query_params)
        await _set_paused(state, "on")
        await state.ask_peers(f"{PAUSE_TOPIC} on")
        await wait_until_idle(state, aborts=mode == "abort")
        if clears_cache:
            await state.engine.control(Control.RESET_PREFIX_CACHE)
        return JSONResponse({"status": "paused"})

    @router.declare(RouteSpec("POST", "/resume", Status, needs=Needs.AWAKE, is_for_operators=True))
    async def resume() -> Response:
        """Accepts new requests again, after `/pause`."""
        await _set_paused(state, "off")
        await state.ask_peers(f"{PAUSE_TOPIC} off")
        return JSONResponse({"status": "resumed"})

    @router.declare(RouteSpec("GET", "/is_paused", Paused, needs=Needs.AWAKE, is_for_operators=True))
    async def is_paused() -> Response:
        """Whether new requests are refused; `/resume` ends that."""
        return JSONResponse({"is_paused": state.is_paused})

    @router.declare(RouteSpec(
        "POST", "/abort_requests", Aborted, body=_ABORT_BODY, needs=Needs.AWAKE, is_for_operators=True
    ))  # fmt: skip
    async def abort_requests(request: Request) -> Response:
        """Ends the requests with these ids, or all without `request_ids`; their finish reason is `abort`."""
        body = await read_object(state, request)
        num_aborted = 0
        for request_id in _request_ids(body.get("request_ids")) or [_EVERYTHING]:
            num_aborted += await _abort(state, request_id)
            num_aborted += sum(await state.ask_peers(f"{ABORT_TOPIC} {request_id}"))
        return JSONResponse({"status": "aborted", "aborted": num_aborted})


def _pause_query(params: Mapping[str, str]) -> tuple[str, bool]:
    """The mode of a pause, and whether the prefix cache is emptied."""
    mode, clear_cache = params.get("mode", "abort"), params.get("clear_cache", "true").lower()
    if mode == "keep":
        raise request_errors.unsupported_value("mode", "requests cannot be frozen here: use 'abort' or 'wait'")
    if mode not in ("abort", "wait"):
        raise request_errors.invalid_value("mode", "expected one of abort, wait")
    if clear_cache not in ("true", "false"):
        raise request_errors.invalid_value("clear_cache", "expected 'true' or 'false'")
    return mode, clear_cache == "true"


def _request_ids(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise request_errors.invalid_type("request_ids", "an array of strings", value)
    if len(value) > MAX_NUM_ABORTED_IDS:
        raise request_errors.array_too_long("request_ids", MAX_NUM_ABORTED_IDS, len(value))
    for index, entry in enumerate(value):
        param = f"request_ids[{index}]"
        if not isinstance(entry, str):
            raise request_errors.invalid_type(param, "a string", entry)
        if not 0 < len(entry) <= MAX_ID_CHARS or not all("!" <= char <= "~" for char in entry):
            raise request_errors.invalid_value(param, f"expected 1 to {MAX_ID_CHARS} visible ASCII characters")
    return value


async def _set_paused(state: ServerState, word: str) -> bool:
    state.is_paused = word == "on"
    return state.is_paused


async def _abort(state: ServerState, request_id: str) -> int:
    """Ends requests of this process; how many there were."""
    if state.opened_engine is None:
        return 0
    running = state.engine.running_request_ids
    found = [name for name in running if request_id == _EVERYTHING or belongs_to(name, request_id)]
    await state.engine.abort(found)
    return len(found)


def belongs_to(engine_id: str, given: str) -> bool:
    """Whether a request of the engine is of an answer with the id `given`, or of a `request_id` like that."""
    names = (engine_id, engine_id.partition("-")[2])
    return any(name.startswith(given) and _ENDING.fullmatch(name, len(given)) is not None for name in names)


async def wait_until_idle(state: ServerState, *, aborts: bool, or_else: str = "The server is paused") -> None:
    """Waits until no process of the server has a request in flight. `or_else`: What holds if that takes too long.

    Raises:
        HTTPError: 503; it did.
    """
    try:
        async with asyncio.timeout(MAX_PAUSE_WAIT_S):
            while True:
                if aborts:  # again and again: a request may have been tokenized meanwhile
                    await _abort(state, _EVERYTHING)
                    await state.ask_peers(f"{ABORT_TOPIC} {_EVERYTHING}")
                if not state.in_flight.count + sum(await state.ask_peers("load")):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise HTTPError(engine_unavailable(f"{or_else}, but requests are still running.")) from None
