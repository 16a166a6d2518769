"""What one API key sees of another one's: nothing, and nothing that tells whether it exists."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.steps import step_record
from server_helpers.waiting import wait_until

from llmstack_llm.requests import GenerationRequest
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.peers import Peers
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.clients import clients_of
from llmstack_types import RequestEvent, RequestStatus, ScheduledRequest, StepRecording

KEYS = ("alice", "bob", "root")
RESPONSE = {"model": "fake", "input": "One", "max_output_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION = {"prompt": "Hello", "max_tokens": 2}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class OwnersEngine(FakeEngineClient):
    """Keeps the tenant and the salt of every request, and holds requests back while `gate` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: list[tuple[str, str]] = []
        self.num_begun = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def _outputs(self, *arguments: Any) -> AsyncIterator[Any]:
        self.num_begun += 1
        await self.gate.wait()
        async for output in super()._outputs(*arguments):
            yield output

    async def submit(self, *requests: GenerationRequest) -> Any:
        self.owners += [(request.tenant, request.cache_salt) for request in requests]
        return await super().submit(*requests)

    def encode(self, *arguments: Any, **options: Any) -> Any:
        self.owners.append((options["tenant"], options["cache_salt"]))
        return super().encode(*arguments, **options)


def http(*keys: str, **options: Any) -> HTTPConfig:
    operators = frozenset({Secret("root")}) if "root" in keys else frozenset()
    return HTTPConfig(api_keys=tuple(map(Secret, keys)), operator_keys=operators, **options)


def app_of(engine: FakeEngineClient, *keys: str, **options: Any) -> Any:
    return build_app(ready_state(engine, http(*keys, **options)))


async def send(app: Any, key: str, method: str, path: str, body: Any = None) -> Answer:
    return await call(app, method, path, body, {"authorization": f"Bearer {key}"} if key else {})


@pytest.fixture
def engine() -> OwnersEngine:
    return OwnersEngine()


@pytest.fixture
async def apps(tmp_path: Path, engine: OwnersEngine) -> AsyncIterator[list[Any]]:
    """Two processes of one server."""
    async with AsyncExitStack() as stack:
        states = [ready_state(engine, http(*KEYS)) for _ in range(2)]
        for index, state in enumerate(states):
            state.config = dataclasses.replace(state.config, deployment_secret=b"of both")
            state.peers = await stack.enter_async_context(Peers(tmp_path, index, 2))
        yield [build_app(state) for state in states]


USES_OF_AN_ID = [
    ("GET", RESPONSES + "/{id}", None),
    ("GET", RESPONSES + "/{id}/input_items", None),
    ("POST", RESPONSES + "/{id}/cancel", None),
    ("DELETE", RESPONSES + "/{id}", None),
    ("POST", RESPONSES, {**RESPONSE, "previous_response_id": "{id}"}),
    ("POST", RESPONSES + "/input_tokens", {**RESPONSE, "previous_response_id": "{id}"}),
    ("POST", RESPONSES, {**RESPONSE, "input": [{"type": "item_reference", "id": "{item}"}]}),
]  # fmt: skip


def filled(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**ids)
    if isinstance(value, list):
        return [filled(entry, ids) for entry in value]
    return {name: filled(entry, ids) for name, entry in value.items()} if isinstance(value, dict) else value


async def test_a_response_of_another_key_looks_like_one_that_never_was(apps: list[Any]):
    made = (await send(apps[0], "alice", "POST", RESPONSES, RESPONSE)).json()
    found = {"id": made["id"], "item": made["output"][0]["id"]}
    unknown = {name: value[:-6] + "abcdef" for name, value in found.items()}
    for key in ("bob", "root"):
        for app in apps:
            for method, path, body in USES_OF_AN_ID:
                foreign = await send(app, key, method, path.format(**found), filled(body, found))
                never = await send(app, key, method, path.format(**unknown), filled(body, unknown))
                assert foreign.json()["error"]["code"] == "not_found"
                assert (foreign.status, foreign.body) == (404, never.body), path
                secret = {"x-request-id"}
                kept = [{k: v for k, v in one.headers.items() if k not in secret} for one in (foreign, never)]
                assert kept[0] == kept[1]
    for app in apps:  # nothing of it is gone, and its owner uses it in every process
        assert (await send(app, "alice", "GET", RESPONSES + "/" + made["id"])).json() == made
        body = {**RESPONSE, "previous_response_id": made["id"]}
        assert (await send(app, "alice", "POST", RESPONSES, body)).status == 200


async def test_a_running_response_is_neither_followed_nor_cancelled_by_another_key(engine: OwnersEngine):
    app = app_of(engine, *KEYS)
    engine.gate.clear()
    made = (await send(app, "alice", "POST", RESPONSES, {**RESPONSE, "background": True})).json()
    await wait_until(lambda: engine.num_begun)
    assert (await send(app, "bob", "POST", f"{RESPONSES}/{made['id']}/cancel")).status == 404
    assert (await send(app, "bob", "DELETE", f"{RESPONSES}/{made['id']}")).status == 404
    assert (await send(app, "alice", "GET", f"{RESPONSES}/{made['id']}")).json()["status"] == "in_progress"
    cancelled = await send(app, "alice", "POST", f"{RESPONSES}/{made['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"


async def test_a_foreign_item_id_is_free_for_ones_own_item(engine: OwnersEngine):
    app = app_of(engine, *KEYS)
    item = {"type": "message", "id": "msg_mine", "role": "user"}
    for key, text in (("alice", "of alice"), ("bob", "of bob")):
        await send(app, key, "POST", RESPONSES, {**RESPONSE, "input": [{**item, "content": text}]})
    for key, text in (("alice", "of alice"), ("bob", "of bob")):
        reference = [{"type": "item_reference", "id": "msg_mine"}]
        await send(app, key, "POST", RESPONSES, {**RESPONSE, "input": reference})
        assert engine.admitted[-1].prompt == text


GENERATING = [
    (COMPLETIONS, COMPLETION),
    (CHATS, CHAT),
    (RESPONSES, RESPONSE),
    ("/v1/messages", {**CHAT, "model": "fake"}),
    ("/v1/embeddings", {"input": "Hello"}),
    ("/invocations", CHAT),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), GENERATING, ids=[path for path, _ in GENERATING])
async def test_every_route_salts_the_prefix_cache_with_its_key(engine: OwnersEngine, path: str, body: Any):
    app = app_of(engine, *KEYS)
    for key, salt in (("alice", None), ("bob", None), ("alice", "s"), ("bob", "s"), ("alice", None)):
        answer = await send(app, key, "POST", path, body if salt is None else {**body, "cache_salt": salt})
        assert answer.status == 200, answer.body
    salts = [salt for _, salt in engine.owners]
    assert len(set(salts)) == 4
    assert salts[0] == salts[4]
    tenants = [tenant for tenant, _ in engine.owners]
    assert tenants[0] == tenants[2] != tenants[1] == tenants[3]


async def test_no_cache_salt_of_one_key_is_the_salt_of_another(engine: OwnersEngine):
    state = ready_state(engine, http(*KEYS))
    alice, bob, _ = clients_of(state.config)
    assert not alice.salt.startswith(bob.salt)
    assert len(alice.salt) == len(bob.salt)
    await send(build_app(state), "bob", "POST", COMPLETIONS, {**COMPLETION, "cache_salt": alice.salt})
    assert engine.owners[-1][1] != alice.salt


async def test_a_shared_cache_has_no_salts_but_those_of_requests(engine: OwnersEngine):
    app = app_of(engine, *KEYS, shares_prefix_cache=True)
    for key, body in (("alice", COMPLETION), ("bob", COMPLETION), ("bob", {**COMPLETION, "cache_salt": "s"})):
        await send(app, key, "POST", COMPLETIONS, body)
    assert [salt for _, salt in engine.owners] == ["", "", "s"]
    assert engine.owners[0][0] != engine.owners[1][0]


async def test_without_keys_there_is_one_tenant_with_an_empty_salt(engine: OwnersEngine):
    app = app_of(engine)
    await send(app, "", "POST", COMPLETIONS, COMPLETION)
    assert engine.owners == [("", "")]


def test_a_tenant_tells_neither_its_key_nor_its_place():
    config = ready_state(FakeEngineClient(), http(*KEYS)).config
    tenants = [client.tenant for client in clients_of(config)]
    reverse = dataclasses.replace(config, http=http(*KEYS[::-1]))
    assert [client.tenant for client in clients_of(reverse)] == tenants[::-1]
    other = dataclasses.replace(config, deployment_secret=b"another")
    assert not set(tenants) & {client.tenant for client in clients_of(other)}
    assert all(key not in tenant for key, tenant in zip(KEYS, tenants, strict=True))
    assert config.deployment_secret.hex() not in repr(config)


def step_log(tenants: dict[str, str]) -> StepRecording:
    rows = [ScheduledRequest(name, 3, 2, [5], [9]) for name in ("a", "b", "old")]
    blocks = {"num_running": 3, "num_free_blocks": 7, "num_blocks": 8}
    steps = [step_record(1, rows[2:], **blocks), step_record(2, rows, **blocks)]
    return StepRecording(20.0, steps, [RequestEvent("b", RequestStatus.RUNNING, 1.0)], tenants)


async def test_steps_show_a_key_those_of_its_own_requests_and_that_others_were_there(engine: OwnersEngine):
    state = ready_state(engine, http(*KEYS))
    alice, bob, _ = clients_of(state.config)
    engine.last_steps = step_log({"a": alice.tenant, "b": bob.tenant})
    app = build_app(state)
    foreign = {"id": "another request"}
    [step] = (await send(app, "alice", "GET", "/steps")).json()["steps"]
    assert (step["requests"][0]["id"], step["requests"][1:]) == ("a", [foreign, foreign])
    assert step["num_free_blocks"] is None
    shown = (await send(app, "bob", "GET", "/steps")).json()
    assert [row["id"] for row in shown["steps"][0]["requests"]] == [foreign["id"], "b", foreign["id"]]
    assert shown["events"][0]["id"] == "b"
    assert (await send(app, "alice", "GET", "/steps")).json()["events"] == []
    [before, step] = (await send(app, "root", "GET", "/steps")).json()["steps"]
    assert [row["id"] for row in before["requests"]] == ["old"]
    assert [row["id"] for row in step["requests"]] == ["a", "b", "old"]
    assert step["num_free_blocks"] == 7


@pytest.mark.parametrize("options", [{"keys": ()}, {"keys": ("alice",)}, {"keys": ("alice", "bob"), "uds": "/run/s"}])
async def test_a_server_without_foreign_keys_shows_everything(engine: OwnersEngine, options: dict[str, Any]):
    engine.last_steps = step_log({"b": "someone"})
    app = app_of(engine, *options.pop("keys"), enable_control_routes=True, **options)
    [_, step] = (await send(app, "alice", "GET", "/steps")).json()["steps"]
    assert [row["id"] for row in step["requests"]] == ["a", "b", "old"]
    assert (await send(app, "alice", "POST", "/reset_prefix_cache")).status == 200


async def test_control_routes_are_for_operators(engine: OwnersEngine):
    app = app_of(engine, *KEYS, enable_control_routes=True)
    refused = await send(app, "alice", "POST", "/reset_prefix_cache")
    assert (refused.status, refused.json()["error"]["code"]) == (403, "operator_key_required")
    assert (await send(app, "root", "POST", "/reset_prefix_cache")).status == 200


async def begun(app: Any, engine: OwnersEngine, key: str, path: str, body: Any) -> asyncio.Task[Answer]:
    """A request that the engine has begun, or that has ended."""
    num_begun = engine.num_begun
    task = asyncio.create_task(send(app, key, "POST", path, {**body, "request_id": "mine"}))
    await wait_until(lambda: engine.num_begun > num_begun or task.done())
    return task


@pytest.mark.parametrize(("first", "second"), [((COMPLETIONS, COMPLETION), (CHATS, CHAT)), ((CHATS, CHAT),) * 2])
async def test_a_request_id_is_used_once_at_a_time_by_each_key(
    apps: list[Any], engine: OwnersEngine, first: tuple[str, Any], second: tuple[str, Any]
):
    for here, there in (apps, apps[::-1], [apps[0]] * 2, [apps[1]] * 2):
        engine.gate.clear()
        running = await begun(here, engine, "alice", *first)
        refused = await (await begun(there, engine, "alice", *second))
        error = refused.json()["error"]
        assert (refused.status, error["code"], error["param"]) == (400, "duplicate_request_id", "request_id")
        foreign = await begun(there, engine, "bob", *second)
        assert not running.done()
        engine.gate.set()
        assert [(await task).status for task in (running, foreign)] == [200, 200]
