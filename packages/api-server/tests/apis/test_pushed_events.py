"""Every API writes the events of an output where it comes, and the stream is the same as without that."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state

MESSAGES = [{"role": "user", "content": "Say it."}]
TEXT = "Hello, <world>!"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say it."},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": "Say it."},
}


def without_ids(body: bytes) -> bytes:
    """The stream without what is drawn for each answer."""
    return re.sub(rb"[0-9a-f]{24,}", b"ID", re.sub(rb'"(created|created_at|completed_at)":[0-9.]+', b'"time"', body))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_resumable", [False, True], ids=["plain", "resumable"])
async def test_outputs_need_no_turn_of_a_task(path: str, is_resumable: bool) -> None:
    engine = FakeEngineClient()
    engine.script = TEXT
    app = build_app(ready_state(engine))
    headers = {"x-llmstack-resume": "60"} if is_resumable else {}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**BODIES[path], limit: len(TEXT), "stream": True}
    asked: list[bool] = []

    def has_room() -> bool:
        asked.append(True)
        return True

    pushed = await call(app, "POST", path, body, headers, has_room=has_room)
    assert pushed.status == 200
    assert len(asked) >= len(TEXT) - 2, "only the first and the last one have turns"
    if not is_resumable:
        sent = await call(app, "POST", path, body, headers, has_room=lambda: False)
        assert without_ids(pushed.body) == without_ids(sent.body)
