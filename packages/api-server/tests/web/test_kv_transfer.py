"""`kv_transfer_params`: read strictly, handed to the engine, and returned with whole answers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmstack_llm.requests import GenerationRequest
from llmstack_server.app import build_app
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_types import KVTransferParams

EXPORT = KVTransferParams(False, True, "e" * 32, "h" * 32, 32)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION = {"prompt": "Hello", "max_tokens": 2}
REQUESTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
# What a proxy of vLLM sends first.
OF_A_PROXY = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class ExportingEngine(FakeEngineClient):
    """Exports the prompts that ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[KVTransferParams | None] = []

    async def submit(self, *requests: GenerationRequest) -> Any:
        self.asked += [request.kv_transfer for request in requests]
        return await super().submit(*requests)

    async def _outputs(self, *arguments: Any) -> AsyncIterator[Any]:
        async for output in super()._outputs(*arguments):
            params = self.asked[-1]
            if params is not None and params.do_remote_decode and output.finished:
                output.kv_transfer_params = EXPORT._asdict()
            yield output


ENGINE = ExportingEngine()


@functools.cache  # an app costs more than all requests to it
def app_of(role: str | None) -> Any:
    state = ready_state(ENGINE)
    if role is not None:
        given = {"kv_connector": "SharedMemoryConnector", "kv_role": role}
        engine_args = dataclasses.replace(state.config.engine, kv_transfer_config=given)
        state.config = dataclasses.replace(state.config, engine=engine_args)
    return build_app(state)


@pytest.fixture
def engine() -> ExportingEngine:
    ENGINE.asked.clear()
    return ENGINE


async def send(path: str, body: dict[str, Any], role: str | None = "kv_both") -> Answer:
    return await call(app_of(role), "POST", path, body)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_what_the_first_server_answers_is_what_the_second_one_takes(
    engine: ExportingEngine, path: str, body: dict[str, Any]
):
    first = (await send(path, {**body, "kv_transfer_params": OF_A_PROXY}, "kv_producer")).json()
    assert first["kv_transfer_params"] == EXPORT._asdict()
    second = {**body, "stream": True, "kv_transfer_params": first["kv_transfer_params"]}
    assert (await send(path, second, "kv_consumer")).status == 200
    assert engine.asked == [KVTransferParams(do_remote_decode=True), EXPORT]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
async def test_what_asks_for_nothing_gets_null(
    engine: ExportingEngine, path: str, body: dict[str, Any], params: dict[str, Any] | None
):
    answer = await send(path, {**body, "kv_transfer_params": params})
    assert (answer.status, answer.json()["kv_transfer_params"], engine.asked) == (200, None, [None])


@pytest.mark.parametrize(
    ("changes", "role", "code"),
    [
        ({}, None, "unsupported_parameter"),
        ({}, "kv_consumer", "unsupported_value"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_producer", "unsupported_value"),
        ({"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "kv_both", "invalid_value"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_both", "invalid_type"),
        ({"kv_transfer_params": {"remote_engine_id": "x" * 129}}, "kv_both", "string_above_max_length"),
        ({"kv_transfer_params": {"num_tokens": -1}}, "kv_both", "invalid_value"),
        ({"kv_transfer_params": {"remote_host": "192.0.2.1"}}, "kv_both", "invalid_value"),
        ({"kv_transfer_params": "yes"}, "kv_both", "invalid_type"),
        ({"stream": True}, "kv_both", "invalid_value"),
        ({"n": 2}, "kv_both", "invalid_value"),
    ],
)
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_what_cannot_be_done_is_refused_and_names_the_field(
    engine: ExportingEngine, path: str, body: dict[str, Any], changes: dict[str, Any], role: str | None, code: str
):
    answer = await send(path, {**body, "kv_transfer_params": OF_A_PROXY, **changes}, role)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"].partition(".")[0]) == (400, code, "kv_transfer_params")
    assert engine.asked == []
