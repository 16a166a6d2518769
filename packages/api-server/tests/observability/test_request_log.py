"""The log of requests: off by default; id, prompt, parameters, finish reason and time when on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.observability.request_log import RequestLog, shortened
from llmstack_server.options.http_options import RequestLogConfig
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOGGER = "llmstack_server.observability.request_log"


def logged_state(engine: FakeEngineClient, **options: Any) -> ServerState:
    engine.add_observer(RequestLog(RequestLogConfig(logs_requests=True, **options)))
    return ready_state(engine)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_line_at_its_beginning_and_one_at_its_end(caplog: pytest.LogCaptureFixture, stream: bool):
    app = build_app(logged_state(FakeEngineClient(), max_chars=4))
    body = {"prompt": "Hello", "max_tokens": 7, "temperature": 0.5, "stream": stream}
    answer = await call(app, "POST", COMPLETIONS, body, {"x-request-id": "mine-1"})
    assert answer.status == 200
    first, last = lines(caplog)
    request_id = (answer.events()[0] if stream else answer.json())["id"]
    assert first.startswith(f"request {request_id}-0 (mine-1): prompt 'Hell'..., 5 tokens, ")
    assert "'temperature': 0.5" in first
    assert "'max_tokens': 7" in first
    assert "top_p" not in first
    assert last.startswith(f"request {request_id}-0: length, 7 tokens after 0.")


async def test_outputs_are_logged_on_demand_and_shortened(caplog: pytest.LogCaptureFixture):
    app = build_app(logged_state(FakeEngineClient(), logs_outputs=True, max_chars=3))
    await call(app, "POST", COMPLETIONS, {"prompt": "Hello", "max_tokens": 7, "n": 2, "stream": True})
    assert lines(caplog)[1].count("'Hel'...") == 2
    caplog.clear()
    await call(app, "POST", CHAT, {"messages": [{"role": "user", "content": "ab\nc"}], "max_tokens": 2})
    assert lines(caplog)[0].partition("prompt ")[2].startswith(r"'ab\n'...")
    assert lines(caplog)[1].endswith(" s")
    assert "'ab'" in lines(caplog)[1]


async def test_token_ids_are_shortened_too(caplog: pytest.LogCaptureFixture):
    app = build_app(logged_state(FakeEngineClient(), max_chars=2))
    await call(app, "POST", COMPLETIONS, {"prompt": [65, 66, 67], "max_tokens": 2})
    assert "prompt [65, 66]..., 3 tokens" in lines(caplog)[0]


async def test_a_client_that_leaves_and_an_error_end_the_request_too(caplog: pytest.LogCaptureFixture):
    engine = FakeEngineClient(step_delay_s=0.005)
    app = build_app(logged_state(engine))
    body = {"prompt": "Hello", "max_tokens": 100, "stream": True}
    await call(app, "POST", COMPLETIONS, body, disconnect_after_parts=2)
    assert ": abort, " in lines(caplog)[1]
    assert len(engine.aborted_request_ids) == 1
    engine.error, engine.num_tokens_before_error = RuntimeError("secret"), 1
    await call(app, "POST", COMPLETIONS, body)
    assert ": RuntimeError, " in lines(caplog)[3]


async def test_what_is_pooled_has_its_lines_too(caplog: pytest.LogCaptureFixture):
    answer = await call(build_app(logged_state(FakeEngineClient())), "POST", "/v1/embeddings", {"input": "secret"})
    assert answer.status == 200
    assert [line.partition(": ")[2].partition(" after")[0] for line in lines(caplog)] == ["6 tokens to pool", "pooled"]
    assert "secret" not in caplog.text


def test_no_text_can_forge_a_line():
    assert shortened("a\nERROR b", None) == r"'a\nERROR b'"
    assert shortened("abc", 0) == "''..."
    assert shortened("abc", 3) == "'abc'"
