"""Every route of the OpenAPI document that takes an id answers one of another key as one that never was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.clients import clients_of
from llmstack_types import RequestEvent as Event
from llmstack_types import RequestStatus, ScheduledRequest, SchedulerStats, StepPhases, StepRecord, StepRecording

UNKNOWN = {
    "response_id": "resp_000" + "a" * 32,
    "file_id": "file-" + "a" * 32,
    "batch_id": "batch_" + "a" * 32,
    "stream_id": "a" * 32,
    "request_id": "cmpl-unknown",
    "session_id": "unknown",
}
PUBLIC = "model"
MADE = "cmpl-of-alice"
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "max_tokens": 1}}
FORM = "".join(
    f'--edge\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'
    for name, more, text in (("purpose", "", "batch"), ("file", '; filename="a"', json.dumps(LINE)))
)


async def send(app: Any, key: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return await call(app, method, path, body, {"authorization": f"Bearer {key}", **headers})


def one_step(tenant: str) -> StepRecording:
    """The steps of a request that alice has sent."""
    stats = SchedulerStats(1, num_running=1, num_free_blocks=7, num_blocks=8)
    record = StepRecord(10.0, StepPhases(0.0, 0.1, 0.0), stats, [ScheduledRequest(MADE, 0, 2, [], [1])])
    events = [
        Event(MADE, status, when) for status, when in ((RequestStatus.WAITING, 9.9), (RequestStatus.RUNNING, 10.0))
    ]
    return StepRecording(20.0, [record], events, {MADE: tenant})


async def make_all(app: Any) -> dict[str, str]:
    """One of everything, by alice; the parameters of routes to ids."""
    fields = {"model": "fake", "input": "One", "max_output_tokens": 3}
    response = await send(app, "alice", "POST", "/v1/responses", fields)
    media_type = "multipart/form-data; boundary=edge"
    upload = (FORM + "--edge--\r\n").encode()
    file_id = (await send(app, "alice", "POST", "/v1/files", upload, **{"content-type": media_type})).json()["id"]
    fields = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await send(app, "alice", "POST", "/v1/batches", fields)
    body = {"prompt": "Hello", "max_tokens": 2, "stream": True}
    stream = await send(app, "alice", "POST", "/v1/completions", body, **{"x-llmstack-resume": "60"})
    return {
        "response_id": response.json()["id"],
        "file_id": file_id,
        "batch_id": batch.json()["id"],
        "stream_id": stream.headers["x-llmstack-stream-id"],
        "request_id": MADE,
        "session_id": "work",
    }


async def test_every_route_answers_a_foreign_id_as_an_unknown_one(tmp_path: Path):
    keys = tuple(map(Secret, ("alice", "bob", "root")))
    engine = FakeEngineClient()
    state = ready_state(engine, HTTPConfig(state_dir=str(tmp_path), api_keys=keys, operator_keys=frozenset(keys[2:])))
    engine.last_steps = one_step(clients_of(state.config)[0].tenant)
    app = build_app(state)
    paths = (await send(app, "bob", "GET", "/openapi.json")).json()["paths"]
    routes = [(method.upper(), path) for path in paths for method in paths[path] if "{" in path]
    assert {path.partition("{")[2].partition("}")[0] for _, path in routes} == {PUBLIC, *UNKNOWN}
    made = await make_all(app)
    asked = [(method, path) for method, path in routes if "{" + PUBLIC not in path]
    for key in ("bob", "root"):
        for method, path in asked:
            if key == "root" and "{request_id}" in path:
                continue  # operators see the requests of all
            foreign = await send(app, key, method, path.format(**made))
            unknown = await send(app, key, method, path.format(**UNKNOWN))
            assert (foreign.status, foreign.body) == (404, unknown.body), (key, method, path)
            kept = [{**one.headers, "x-request-id": ""} for one in (foreign, unknown)]
            assert kept[0] == kept[1], (key, method, path)
    for method, path in asked:  # all is still there
        if method == "GET":
            assert (await send(app, "alice", method, path.format(**made))).status == 200, path
    for end in state.at_end:
        await end()
