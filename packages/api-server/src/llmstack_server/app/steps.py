"""`GET /steps`: the step log of an engine core, for pages that show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_types import RequestEvent, ScheduledRequest, StepRecord, StepRecording

MAX_DIGITS = 18
FOREIGN_ID = "another request"

IsShown = Callable[[str], bool]


def add_steps_routes(router: APIRouter, state: ServerState) -> None:
    """Adds the route, which is read-only and needs the API key. Operators see every request, others their own."""

    @router.get("/steps")
    async def steps(request: Request) -> Response:
        """Steps of engine core `engine` after step `after`, oldest first, and the last events of requests."""
        after_step = parse_number("after", request.query_params)
        engine_index = parse_number("engine", request.query_params, max_number=len(state.engine.engines) - 1)
        log = await state.engine.recent_steps(after_step, engine_index)
        client = current_client.get()
        return JSONResponse(step_log_object(log, time.time(), None if client.is_operator else client.tenant))


def parse_number(name: str, params: Mapping[str, str], *, max_number: int = 10**MAX_DIGITS) -> int:
    """A number of the query, 0 where it is absent; raises InvalidRequestError for anything else."""
    text = params.get(name, "0")
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS or int(text) > max_number:
        raise request_errors.invalid_value(name, f"it is not a number from 0 to {max_number}")
    return int(text)


def step_log_object(log: StepRecording, now: float, tenant: str | None = None) -> dict[str, Any]:
    """The log as JSON; `now` is the time of day at `log.now_s`, in seconds since 1970.

    `tenant`: Who reads it, and sees of the requests of others that they exist; None sees all.
    """

    def at(time_s: float) -> float:
        return round(now - (log.now_s - time_s), 6)

    def is_shown(request_id: str) -> bool:
        return tenant is None or log.tenants.get(request_id) == tenant

    steps = [_step(record, at, is_shown) for record in log.steps]
    if tenant is not None:
        for step in steps:  # the blocks that steps take tell how long their requests are
            step["num_free_blocks"] = None
    return {
        "now": round(now, 6),
        "steps": steps,
        "events": [_event(event, at, is_shown) for event in log.events],
    }


def _step(record: StepRecord, at: Callable[[float], float], is_shown: IsShown) -> dict[str, Any]:
    stats, phases = record.stats, record.phases
    return {
        "step": stats.step,
        "time": at(record.start_s),
        "schedule_ms": round(1000 * phases.schedule_s, 3),
        "execute_ms": round(1000 * phases.execute_s, 3),
        "update_ms": round(1000 * phases.update_s, 3),
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_swapped": stats.num_swapped,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_preemptions": stats.num_preemptions,
        "requests": [_row(row) if is_shown(row.request_id) else {"id": FOREIGN_ID} for row in record.rows],
    }


def _row(row: ScheduledRequest) -> dict[str, Any]:
    return {
        "id": row.request_id,
        "num_computed_tokens": row.num_computed_tokens,
        "num_scheduled_tokens": row.num_scheduled_tokens,
        "num_draft_tokens": len(row.draft_token_ids),
        "new_block_ids": list(row.new_block_ids),
    }


def _event(event: RequestEvent, at: Callable[[float], float], is_shown: IsShown) -> dict[str, Any]:
    shown_id = event.request_id if is_shown(event.request_id) else FOREIGN_ID
    return {"time": at(event.time_s), "id": shown_id, "status": event.status.name}
