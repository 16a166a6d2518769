"""`GET /live` draws requests over steps, and a stream feeds it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from llmstack_engine_core.timeline import timeline_of, timeline_page
from llmstack_server.app.chat_page import page_response
from llmstack_server.app.steps import parse_number
from llmstack_server.protocols import ReloadableEngine
from llmstack_server.state.server_state import ServerState
from llmstack_server.web import sse
from llmstack_server.web.answers import STREAM_HEADERS
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, answer_to, server_is_overloaded
from llmstack_server.web.middleware import LIVE_PATH
from llmstack_types import EngineDeadError, StepRecording

INTERVAL_S = 0.5
# An empty part this often shows a proxy that the stream is alive, and a lost reader that it is gone.
KEEP_ALIVE_S = 5.0
MAX_READERS = 16


def add_live_page(router: APIRouter, state: ServerState) -> None:
    """Adds the page, which needs no key, and its stream, which does. Operators see every request, others their own."""
    num_readers = 0

    @router.head(LIVE_PATH, include_in_schema=False)
    @router.get(LIVE_PATH, include_in_schema=False)
    async def live_page(request: Request) -> Response:
        """A document without data: the stream needs the key."""
        return page_response(request, timeline_page())

    @router.get(f"{LIVE_PATH}/events", include_in_schema=False)
    async def live_events(request: Request) -> Response:
        """Steps of engine core `engine` after step `after`, and those that follow, as server-sent events.

        `core` of an earlier event says which engine core `after` is of. Those of another one are sent from its first.
        """
        after_step = parse_number("after", request.query_params)
        engine_index = parse_number("engine", request.query_params, max_number=len(state.engine.engines) - 1)
        if num_readers >= MAX_READERS:
            raise HTTPError(server_is_overloaded())
        client = current_client.get()
        tenant = None if client.is_operator else client.tenant
        core = request.query_params.get("core", "")
        return StreamingResponse(
            counted(_events(state, engine_index, after_step, core, tenant)), headers=STREAM_HEADERS
        )

    async def counted(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        nonlocal num_readers
        num_readers += 1
        try:
            async for event in events:
                yield event
        finally:
            num_readers -= 1


async def _events(
    state: ServerState, engine_index: int, after_step: int, core: str, tenant: str | None
) -> AsyncIterator[bytes]:
    """Ends when the server drains, and with an error object where the engine is gone."""
    sent_s: float | None = None  # an empty part is first, so that the reader knows the number of engine cores
    while not state.lifecycle.is_stopping:
        # After a crash or a reload there is another one, whose steps begin again.
        before, core = core, _core(state, engine_index) or core
        if before and core != before:
            after_step = 0
        try:
            log = await state.engine.recent_steps(after_step, engine_index)
        except EngineDeadError as error:
            yield sse.frame(sse.encode_json(answer_to(error, "").body()))
            return
        now_s = time.monotonic()
        if log.steps or sent_s is None or now_s - sent_s >= KEEP_ALIVE_S:
            after_step, sent_s = log.steps[-1].stats.step if log.steps else after_step, now_s
            part = {"core": core, "weights": _weights(state), **_part(log, tenant, len(state.engine.engines))}
            if tenant is None:
                part["shadow"] = state.metrics.shadows.live_part(engine_index)
            yield sse.frame(sse.encode_json(part))
        await asyncio.sleep(INTERVAL_S)


def _core(state: ServerState, engine_index: int) -> str:
    """Tells engine cores apart that had the same place one after the other; empty while there is none."""
    pid = next((engine.pid for engine in state.engine.engines if engine.engine_index == engine_index), None)
    if pid is None:
        return ""
    return hashlib.blake2b(b"%d" % pid, digest_size=8, key=state.config.deployment_secret[:64]).hexdigest()


def _weights(state: ServerState) -> dict[str, Any] | None:
    """The weights that answer new requests, where they can change, and how many requests of before still run.

    Only one process knows that number, so it is None where there are several.
    """
    if not state.config.reload.reload_models:
        return None
    num_finishing = state.engine.num_finishing_requests if isinstance(state.engine, ReloadableEngine) else 0
    return {"name": state.weights_name, "num_finishing": num_finishing if state.peers is None else None}


def _part(log: StepRecording, tenant: str | None, num_engines: int) -> dict[str, Any]:
    now = time.time()

    def at(time_s: float) -> float:
        return now - (log.now_s - time_s)

    def is_shown(request_id: str) -> bool:
        return log.tenants.get(request_id) == tenant

    return {"num_engines": num_engines, **timeline_of(log, at, None if tenant is None else is_shown)}
