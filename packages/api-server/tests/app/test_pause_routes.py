"""Pauses between requests, and requests that an operator ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.app.pause_routes import belongs_to
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

BODY = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True}
HEX = "0123456789abcdef" * 2


class Running:
    """An application over an engine that takes its time."""

    def __init__(self, llm: AsyncLLM, client: FakeEngineCoreClient) -> None:
        self.llm, self.client = llm, client
        self.app = build_app(ready_state(llm, HTTPConfig(enable_control_routes=True), ready=client.ready))

    async def begin(self, **fields: Any) -> asyncio.Task[Any]:
        """A request that runs until something ends it."""
        num_before = len(self.llm.running_request_ids)
        task = asyncio.create_task(call(self.app, "POST", "/v1/completions", {**BODY, **fields}))
        await wait_until(lambda: len(self.llm.running_request_ids) > num_before)
        return task


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    folder = write_model_folder(tmp_path / "m")
    client = FakeEngineCoreClient()
    client.step_delay_s = 0.5
    llm = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
    await llm.wait_until_ready()
    yield Running(llm, client)
    await llm.shutdown()


async def test_requests_end_by_their_id(running: Running) -> None:
    mine, other = await running.begin(request_id="mine"), await running.begin(request_id="mine-1")
    found = await call(running.app, "POST", "/abort_requests", {"request_ids": ["mine", "unknown"]})
    assert found.json() == {"status": "aborted", "aborted": 1}
    assert (await mine).json()["choices"][0]["finish_reason"] == "abort"
    assert not other.done()
    assert (await call(running.app, "POST", "/abort_requests", {})).json()["aborted"] == 1
    assert (await other).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_pause_ends_requests_and_refuses_new_ones(running: Running) -> None:
    task = await running.begin()
    assert (await call(running.app, "POST", "/pause")).json() == {"status": "paused"}
    assert (await task).json()["choices"][0]["finish_reason"] == "abort"
    assert (await call(running.app, "GET", "/is_paused")).json() == {"is_paused": True}
    refused = await call(running.app, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (await call(running.app, "GET", "/health")).status == 200
    assert (await call(running.app, "POST", "/resume")).json() == {"status": "resumed"}
    running.client.step_delay_s = 0.0
    assert (await call(running.app, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})).status == 200


@pytest.mark.parametrize(
    ("query", "param"), [("clear_cache=null", "clear_cache"), ("clear_cache=", "clear_cache"), ("mode=later", "mode")]
)
async def test_a_pause_with_a_wrong_query_pauses_nothing(query: str, param: str) -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True)))
    refused = await call(app, "POST", f"/pause?{query}")
    assert (refused.status, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["code"] == "invalid_value"
    assert (await call(app, "GET", "/is_paused")).json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("body", "param"),
    [({"request_ids": "mine"}, "request_ids"), ({"request_ids": [1]}, "request_ids[0]"),
     ({"request_ids": ["a b"]}, "request_ids[0]"), ({"request_ids": ["a"] * 1025}, "request_ids")],
)  # fmt: skip
async def test_ids_to_end_are_checked(body: dict[str, Any], param: str) -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True)))
    answer = await call(app, "POST", "/abort_requests", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/pause", "/resume", "/abort_requests"])
async def test_the_routes_are_closed_by_default(path: str) -> None:
    assert (await call(build_app(ready_state(FakeEngineClient())), "POST", path, {})).status == 404


@pytest.mark.parametrize(
    ("engine_id", "given", "is_match"),
    [
        (f"cmpl-mine-{HEX}-0", "mine", True),
        (f"cmpl-mine-{HEX}-0", "cmpl-mine", True),
        (f"chatcmpl-{HEX}", f"chatcmpl-{HEX}", True),
        (f"chatcmpl-mine-1-{HEX}", "mine", False),
        (f"chatcmpl-mine-{HEX}", "min", False),
        (f"chatcmpl-{HEX}", "", False),
    ],
)
def test_an_id_belongs_to_one_answer(engine_id: str, given: str, is_match: bool) -> None:
    assert (given != "" and belongs_to(engine_id, given)) == is_match
