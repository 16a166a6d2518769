"""`GET /live` draws requests over steps, and a stream feeds it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from llmstack_engine_core.timeline import timeline_of, timeline_page
from llmstack_server.app.chat_page import page_response
from llmstack_server.app.steps import parse_number, read_steps
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
# What API processes ask each other for their part of the page, with the age of what is new in milliseconds.
TOPIC = "live"
# Predictions of so long ago are sent to a new reader, and those of a little before its last part again.
KEPT_S, OVERLAP_S = 3600.0, 2.0
_OFFSET_S = time.time() - time.monotonic()


def add_live_page(router: APIRouter, state: ServerState) -> None:
    """Adds the page, which needs no key, and its stream, which does. Operators see every request, others their own."""
    num_readers = 0
    if state.peers is not None:
        state.peers.add_topic(TOPIC, lambda age_ms: _answer(state, age_ms))

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
    clock = _Clock()
    sent_s: float | None = None  # an empty part is first, so that the reader knows the number of engine cores
    while not state.lifecycle.is_stopping:
        asked_s = time.monotonic()
        try:
            log, found, gap = await read_steps(state, engine_index, after_step, core)
        except EngineDeadError as error:
            yield sse.frame(sse.encode_json(answer_to(error, "").body()))
            return
        now_s = time.monotonic()
        if log.steps or gap or sent_s is None or now_s - sent_s >= KEEP_ALIVE_S:
            age_s = KEPT_S if sent_s is None else now_s - sent_s + OVERLAP_S
            if gap and not log.steps:
                after_step = 0
            clock.read(log.now_s, asked_s, now_s, found)
            after_step, sent_s, core = log.steps[-1].stats.step if log.steps else after_step, now_s, found
            reports = [_report(state, age_s), *await state.ask_peers(f"{TOPIC} {round(1000 * age_s)}")]
            part = {
                "core": core, "gap": gap, "weights": _weights(state, reports),
                "predictions": _predictions(reports, tenant),
                **_part(log, tenant, len(state.engine.engines), clock.time_of_day),
            }  # fmt: skip
            if tenant is None:
                part["shadow"] = state.metrics.shadows.live_part(engine_index)
            yield sse.frame(sse.encode_json(part))
        await asyncio.sleep(INTERVAL_S)


class _Clock:
    """The time of day at times of an engine core: always the same for one time, however late an answer comes."""

    def __init__(self) -> None:
        self._core: str | None = None
        self._offset_s = 0.0

    def read(self, time_s: float, asked_s: float, answered_s: float, core: str) -> None:
        """`time_s` by the clock of an engine core was between two times by that of this machine."""
        if core == self._core:
            return
        is_ours = asked_s <= time_s <= answered_s  # else it is the clock of another machine
        self._core, self._offset_s = core, _OFFSET_S if is_ours else time.time() - time_s

    def time_of_day(self, time_s: float) -> float:
        """The same time in seconds since 1970."""
        return time_s + self._offset_s


def _report(state: ServerState, age_s: float) -> dict[str, Any]:
    """The part of this process: what it has predicted in the last seconds, and who finishes with earlier weights."""
    num_finishing = state.engine.num_finishing_requests if isinstance(state.engine, ReloadableEngine) else 0
    return {"predictions": state.recent_requests.rows(age_s), "num_finishing": num_finishing}


async def _answer(state: ServerState, age_ms: str) -> dict[str, Any] | None:
    return None if state.opened_engine is None else _report(state, int(age_ms) / 1000)


def _weights(state: ServerState, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The weights that answer new requests, where they can change, and how many requests of before still run."""
    if not state.config.reload.reload_models:
        return None
    return {"name": state.weights_name, "num_finishing": sum(report["num_finishing"] for report in reports)}


def _predictions(reports: Sequence[Mapping[str, Any]], tenant: str | None) -> list[list[Any]]:
    """Request ids, with the predicted and the real milliseconds to the first token; of one tenant, or of all."""
    rows = [row for report in reports for row in report["predictions"]]
    return [[request_id, *times] for owner, request_id, *times in rows if tenant is None or owner == tenant]


def _part(log: StepRecording, tenant: str | None, num_engines: int, at: Callable[[float], float]) -> dict[str, Any]:
    def is_shown(request_id: str) -> bool:
        return log.tenants.get(request_id) == tenant

    return {"num_engines": num_engines, **timeline_of(log, at, None if tenant is None else is_shown)}
