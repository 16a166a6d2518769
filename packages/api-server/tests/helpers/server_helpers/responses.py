"""Calls of /v1/responses."""

from __future__ import annotations

from typing import Any

from llmstack_server.testing import Answer, call

RESPONSES = "/v1/responses"


async def create(app: Any, **fields: Any) -> Answer:
    return await call(app, "POST", RESPONSES, {"input": "Hello", "max_output_tokens": 7, "temperature": 0, **fields})


def named_events(answer: Answer) -> list[str]:
    lines = answer.body.decode().splitlines()
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
