"""Steps of two requests, and a reader of the stream of `/live`."""

from __future__ import annotations

import json
from typing import Any

from engine_core_helpers.steps import step_record

from llmstack_server.app import build_app
from llmstack_server.options.secret import Secret
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import call
from llmstack_server.web.clients import clients_of
from llmstack_types import RequestEvent, RequestStatus, ScheduledRequest, StepRecording

KEYS = (Secret("first-key"), Secret("second-key"))


def kept_steps(state: ServerState | None = None) -> StepRecording:
    steps = [
        step_record(
            step,
            [ScheduledRequest("mine", 3, 4 if step == 1 else 1, [5]), ScheduledRequest("other", 0, 1, [])],
            10.0 + step,
            (0.001, 0.002, 0.003),
            num_running=2,
            num_free_blocks=5,
            num_blocks=8,
        )
        for step in (1, 2, 3)
    ]
    events = [RequestEvent(name, RequestStatus.WAITING, 10.5) for name in ("mine", "other")]
    keys = [] if state is None else [client.tenant for client in clients_of(state.config)]
    tenants = dict(zip(("mine", "other"), keys, strict=False))
    return StepRecording(20.0, steps, events, tenants)


async def read_once(state: ServerState, path: str = "/live/events", key: str | None = None) -> dict[str, Any]:
    """The first part of the stream, which a drain ends after it."""
    app = build_app(state)
    read = state.engine.recent_steps

    async def last_read(after_step: int = 0, engine_index: int = 0) -> StepRecording:
        if not state.lifecycle.is_stopping:
            state.lifecycle.advance(LifecycleState.DRAINING)
        return await read(after_step, engine_index)

    state.engine.recent_steps = last_read  # type: ignore[method-assign]
    answer = await call(app, "GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.headers["content-type"].startswith("text/event-stream")
    part: dict[str, Any]
    (part,) = [json.loads(line[5:]) for line in answer.body.decode().splitlines() if line]
    return part
