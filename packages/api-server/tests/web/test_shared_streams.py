"""Two API processes: a retry or a lost stream goes on in the other one, over HTTP as over the process itself."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from llmstack_server.app import build_app
from llmstack_server.state.peers import Peers
from llmstack_server.testing import FakeEngineClient, call, ready_state

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20}
STREAM = BODY | {"stream": True}


async def test_a_retry_and_a_lost_stream_go_on_in_the_other_process(tmp_path: Path):
    engine = FakeEngineClient()
    async with AsyncExitStack() as stack:
        apps = []
        for index in range(2):
            state = ready_state(engine)
            state.peers = await stack.enter_async_context(Peers(tmp_path, index, 2))
            apps.append(build_app(state))
        for here, there in (apps, apps[::-1]):
            engine.admitted.clear()
            for body in (BODY, STREAM):
                headers = {"Idempotency-Key": f"{apps.index(here)} {len(body)}"}
                first = await call(here, "POST", PATH, body, headers)
                again = await call(there, "POST", PATH, body, headers)
                assert (again.status, again.body) == (200, first.body)
                reused = await call(there, "POST", PATH, body | {"n": 2}, headers)
                assert reused.json()["error"]["code"] == "idempotency_key_reused"
            left = await call(here, "POST", PATH, STREAM, {"x-llmstack-resume": "60"}, disconnect_after_parts=3)
            stream_id = left.headers["x-llmstack-stream-id"]
            after = left.body.count(b"\n\n")
            rest = await call(there, "GET", f"/v1/streams/{stream_id}?after={after}")
            parts = (left.body + rest.body).split(b"\n\n")
            assert [part.partition(b'"choices"')[2] for part in parts] == [
                part.partition(b'"choices"')[2] for part in first.body.split(b"\n\n")
            ]
            repeated = await call(there, "POST", PATH, STREAM, {"Last-Event-ID": f"{stream_id}.{after}"})
            assert repeated.body == rest.body
            assert len(engine.admitted) == 3
