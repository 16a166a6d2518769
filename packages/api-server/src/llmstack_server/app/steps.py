"""`GET /steps`: the last steps of an engine core; `GET /steps/log`: its step log."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Steps
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, step_log_not_kept
from llmstack_server.web.openapi import NUMBER, TEXT
from llmstack_server.web.routes import Content, Needs, Router, RouteSpec
from llmstack_types import RequestEvent, ScheduledRequest, StepRecord, StepRecording

MAX_DIGITS = 18
FOREIGN_ID = "another request"
OCTET_STREAM = "application/octet-stream"
# Why steps are missing: the engine core is another one, or it keeps only later steps.
REPLACED, FORGOTTEN = "engine_core_replaced", "steps_forgotten"

IsShown = Callable[[str], bool]


def add_steps_routes(router: Router, state: ServerState) -> None:
    """Adds the routes, which are read-only and need the API key.

    Operators see every request in the steps, others their own. The log holds the tokens of all: it is for operators.
    """

    engine_query = {"engine": (NUMBER, "the index of the engine core")}

    @router.declare(RouteSpec(
        "GET", "/steps", Steps, needs=Needs.ENGINE,
        query={
            "after": (NUMBER, "the last step that is known"), **engine_query,
            "core": (TEXT, "the engine core that `after` is of, from an earlier answer"),
        },
    ))  # fmt: skip
    async def steps(request: Request) -> Response:
        """Steps of engine core `engine` after step `after`, oldest first, and the last events of requests.

        `core` of an earlier answer says which engine core `after` is of. `gap` says what is missing after `after`.
        """
        after_step = parse_number("after", request.query_params)
        engine_index = parse_number("engine", request.query_params, max_number=len(state.engine.engines) - 1)
        found = await read_steps(state, engine_index, after_step, request.query_params.get("core", ""))
        client = current_client.get()
        tenant = None if client.is_operator else client.tenant
        shown = step_log_object(found.log, time.time(), tenant)
        return JSONResponse({**shown, "core": found.core, "gap": found.gap})

    @router.declare(RouteSpec(
        "GET", "/steps/log", Content.FILE, query=engine_query, needs=Needs.ENGINE, is_for_operators=True
    ))  # fmt: skip
    async def log(request: Request) -> Response:
        """The step log of engine core `engine`, for `llmstack replay`, `explain --log` and `tune`; for operators."""
        engine_index = parse_number("engine", request.query_params, max_number=len(state.engine.engines) - 1)
        data = await state.engine.step_log(engine_index)
        if not data:
            raise HTTPError(step_log_not_kept())
        disposition = 'attachment; filename="llmstack.steps"'
        return Response(data, media_type=OCTET_STREAM, headers={"content-disposition": disposition})


class FoundSteps(NamedTuple):
    """Steps of an engine core.

    Attributes:
        core: Tells engine cores apart that had the same place one after the other; empty while there is none.
        gap: The steps that are missing between the requested one and the first one; None if there are none.
    """

    log: StepRecording
    core: str
    gap: dict[str, object] | None


async def read_steps(state: ServerState, engine_index: int, after_step: int, core: str = "") -> FoundSteps:
    """The steps after `after_step` of an engine core; those of another one than `core` are read from its first.

    Without `core`, an engine core that has no step up to that number is another one.
    """
    found = core_name(state, engine_index) or core
    if core and found != core:
        log = await state.engine.recent_steps(0, engine_index)
        return FoundSteps(log, found, _gap(REPLACED, after_step, log))
    log = await state.engine.recent_steps(after_step, engine_index)
    is_next = log.steps[0].stats.step == after_step + 1 if log.steps else bool(core)
    if not after_step or is_next:
        return FoundSteps(log, found, None)
    # Steps that compute nothing are not kept, so the next number may be missing where no step is.
    since = await state.engine.recent_steps(after_step - 1, engine_index)
    if since.steps and since.steps[0].stats.step == after_step:
        return FoundSteps(log, found, None)
    whole = await state.engine.recent_steps(0, engine_index)
    if whole.steps and whole.steps[0].stats.step <= after_step <= whole.steps[-1].stats.step:
        return FoundSteps(log, found, None)
    reason, shown = (FORGOTTEN, log) if core or log.steps else (REPLACED, whole)
    return FoundSteps(shown, found, _gap(reason, after_step, shown))


def _gap(reason: str, after_step: int, log: StepRecording) -> dict[str, object]:
    next_step = log.steps[0].stats.step if log.steps else None
    return {"reason": reason, "after": after_step, "next": next_step}


def core_name(state: ServerState, engine_index: int) -> str:
    """The name of an engine core's process, from which nothing can be read; empty while there is none."""
    pid = next((engine.pid for engine in state.engine.engines if engine.engine_index == engine_index), None)
    if pid is None:
        return ""
    return hashlib.blake2b(b"%d" % pid, digest_size=8, key=state.config.deployment_secret[:64]).hexdigest()


def parse_number(name: str, params: Mapping[str, str], *, max_number: int = 10**MAX_DIGITS - 1) -> int:
    """A number of the query, 0 where it is absent; raises InvalidRequestError for anything else."""
    text = params.get(name, "0")
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS or int(text) > max_number:
        raise request_errors.invalid_value(name, f"it is not a number from 0 to {max_number}")
    return int(text)


def step_log_object(log: StepRecording, now: float, tenant: str | None = None) -> dict[str, object]:
    """The log as JSON; `now` is the time of day at `log.now_s`, in seconds since 1970.

    `tenant`: Who reads it, and sees the steps of its own requests, and that others were in those; None sees all.
    """

    def at(time_s: float) -> float:
        return round(now - (log.now_s - time_s), 6)

    def is_shown(request_id: str) -> bool:
        return tenant is None or log.tenants.get(request_id) == tenant

    records = [one for one in log.steps if tenant is None or any(is_shown(row.request_id) for row in one.rows)]
    steps = [_step(record, at, is_shown) for record in records]
    if tenant is not None:
        for step in steps:  # the blocks that steps take tell how long their requests are
            step["num_free_blocks"] = None
    return {
        "now": round(now, 6),
        "steps": steps,
        "events": [_event(event, at) for event in log.events if is_shown(event.request_id)],
    }


def _step(record: StepRecord, at: Callable[[float], float], is_shown: IsShown) -> dict[str, object]:
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


def _row(row: ScheduledRequest) -> dict[str, object]:
    return {
        "id": row.request_id,
        "num_computed_tokens": row.num_computed_tokens,
        "num_scheduled_tokens": row.num_scheduled_tokens,
        "num_draft_tokens": len(row.draft_token_ids),
        "new_block_ids": list(row.new_block_ids),
    }


def _event(event: RequestEvent, at: Callable[[float], float]) -> dict[str, object]:
    return {"time": at(event.time_s), "id": event.request_id, "status": event.status.name}
