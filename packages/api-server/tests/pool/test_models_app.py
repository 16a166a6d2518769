"""A server with several models over HTTP: which one answers, what waits for it, and what a key may see."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from server_helpers.several_models import COMPLETION, GIB, Setup, key_header
from starlette.types import Message

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.pool import dispatch
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.testing import call
from llmstack_server.web.errors import HTTPError


async def test_the_model_that_a_request_names_is_loaded_and_answers():
    server = Setup()
    assert await server.statuses() == {"small": "unloaded", "gpt-4o": "unloaded", "large": "unloaded"}
    for name in ("large", "small", "gpt-4o", "large"):
        answer = await server.complete(name)
        assert (answer.status, answer.json()["model"]) == (200, name)
    assert [host.num_starts for host in server.hosts.values()] == [1, 1]
    assert [len(host.engine.admitted) for host in server.hosts.values()] == [2, 2]
    assert set((await server.statuses()).values()) == {"loaded"}
    assert (await call(server.app, "GET", "/v1/models/large")).json()["status"] == {"value": "loaded"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/show", {}),
    ],
)
async def test_every_api_finds_its_model(path: str, body: dict[str, Any]):
    server = Setup()
    assert (await call(server.app, "POST", path, {**body, "model": "large"})).status == 200
    unknown = await call(server.app, "POST", path, {**body, "model": "medium"})
    assert unknown.status == 404
    assert "`small`, `large`" in unknown.body.decode()
    assert (await call(server.app, "POST", path, body)).status == 400  # which one?
    assert (await call(server.app, "POST", path, {**body, "model": 1})).status == 400


async def test_a_request_that_names_no_model_of_the_server_is_refused_before_anything_is_loaded():
    server = Setup()
    refused = await server.complete(None)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "model")
    for name in ("none", "", "large:latest:latest"):
        assert (await server.complete(name)).json()["error"]["code"] == "model_not_found"
    assert (await server.complete("large:latest")).status == 404  # the tag is Ollama's, and its routes take it
    assert (await call(server.app, "POST", "/v1/completions", b"{")).status == 400
    assert (await call(server.app, "POST", "/v1/nothing", {"model": "small"})).status == 404
    assert (await call(server.app, "GET", "/v1/completions")).status == 405
    assert set((await server.statuses()).values()) <= {"unloaded", "loaded"}


async def test_ollamas_clients_see_which_models_there_are_and_which_are_loaded():
    server = Setup()
    body = {"messages": [{"role": "user", "content": "a"}], "stream": False}
    answer = await call(server.app, "POST", "/api/chat", {"model": "large:latest", **body})
    assert answer.status == 200
    tags, running = [(await call(server.app, "GET", path)).json()["models"] for path in ("/api/tags", "/api/ps")]
    assert [model["name"] for model in tags] == ["small", "gpt-4o", "large"]
    assert [model["name"] for model in running] == ["large"]
    assert (await call(server.app, "POST", "/api/show", {"name": "small"})).status == 200
    assert server.hosts["small"].num_starts == 0  # what is asked about a model does not load it
    assert (await call(server.app, "GET", "/api/version")).status == 200


async def test_requests_wait_for_a_load_together_and_within_their_deadlines():
    server = Setup()
    host = server.hosts["large"]
    host.may_start.clear()
    assert (await server.complete("small")).status == 200
    waiting = [asyncio.create_task(server.complete("large")) for _ in range(3)]
    late = await server.complete("large", {"x-llmstack-deadline-ms": "20"})
    also_late = await server.complete("large", deadline_ms=20)
    assert {late.status, also_late.status} == {408}
    assert (await server.statuses())["large"] == "loading"
    assert (await server.complete("small")).status == 200  # a model that is loaded does not wait
    assert server.state.in_flight.count == 3
    host.may_start.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 3
    assert host.num_starts == 1


async def test_waiting_requests_are_bounded_and_end_with_their_clients_and_with_the_server():
    server = Setup()
    host = server.hosts["large"]
    host.may_start.clear()
    model = server.pool.find("large")
    assert model is not None
    model.waiting = type(model.waiting)(2, None)
    waiting = [asyncio.create_task(server.complete("large")) for _ in range(2)]
    await asyncio.sleep(0.02)
    refused = await server.complete("large")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    server.state.in_flight.cut()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {503}
    gone = asyncio.create_task(
        call(server.app, "POST", "/v1/completions", {**COMPLETION, "model": "small"}, disconnect_after_parts=0)
    )
    await gone
    assert model.waiting.num_requests == 0


async def asleep() -> Setup:
    """A server whose model `large` has fallen asleep."""
    server = Setup(idle_sleep_s=0.0)
    assert (await server.complete("large")).status == 200
    idle = server.hosts["large"].state.idle
    assert idle is not None
    idle.tick()
    await asyncio.sleep(0.02)
    assert (await server.statuses())["large"] == "sleeping"
    idle.after_s = 3600.0
    return server


async def test_requests_that_wait_for_a_wake_are_bounded_as_those_that_wait_for_a_load():
    server = await asleep()
    model, may_wake = server.pool.models[1], asyncio.Event()
    model.waiting = type(model.waiting)(2, None)
    idle = server.hosts["large"].state.idle
    assert idle is not None
    idle.before_wake = may_wake.wait  # type: ignore[assignment]  # its result is not used
    waiting = [asyncio.create_task(server.complete("large")) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert model.waiting.num_requests == 2
    refused = await server.complete("large")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    may_wake.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert (await server.statuses())["large"] == "loaded"


async def test_a_question_about_a_request_loads_and_wakes_nothing():
    server = Setup()
    path = "/v1/requests/none/explanation"
    missing = await call(server.app, "GET", path)
    assert (missing.status, missing.json()["error"]["code"]) == (404, "not_found")
    server = await asleep()
    await call(server.app, "GET", path)
    resumed = await server.complete("large", {"last-event-id": f"{'0' * 32}.1"}, stream=True)
    assert resumed.status == 404
    assert (await call(server.app, "GET", "/steps?model=large")).status == 200
    assert (await call(server.app, "GET", "/steps?model=small")).status == 503
    assert await server.statuses() == {"small": "unloaded", "gpt-4o": "unloaded", "large": "sleeping"}


async def test_a_form_that_names_no_model_costs_one_pass_and_ends_in_time():
    body = b'x name="model"\r\n' * 4000
    parts: list[Message] = [
        {"type": "http.request", "body": body[start : start + 100], "more_body": True}
        for start in range(0, len(body), 100)
    ]

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(60)
        return parts.pop(0)

    began_s = time.process_time()
    with pytest.raises(HTTPError) as caught:
        await dispatch._read_form(receive, 0.5)
    assert caught.value.answer.status == 408
    assert time.process_time() - began_s < 5.0  # minutes, where each line is the start of all that follow


async def test_a_key_sees_and_uses_its_models_alone():
    keys = {name: Secret(name) for name in ("all", "one", "other")}
    models = {keys["one"]: frozenset({"small"}), keys["other"]: frozenset({"large"})}
    server = Setup(HTTPConfig(api_keys=tuple(keys.values()), key_to_models=models))
    listed = await call(server.app, "GET", "/v1/models", headers=key_header("one"))
    assert [model["id"] for model in listed.json()["data"]] == ["small", "gpt-4o"]
    assert (await server.complete("small", key_header("one"))).status == 200
    assert (await server.complete("gpt-4o", key_header("one"))).status == 200
    refused = await server.complete("large", key_header("one"))
    assert (refused.status, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert refused.json()["error"]["message"].endswith("Available models: `small`.")
    assert server.hosts["large"].num_starts == 0
    assert (await call(server.app, "GET", "/v1/models/large", headers=key_header("one"))).status == 404
    for path in ("/api/tags", "/api/ps", "/server_info", "/metrics"):
        for key, foreign in (("one", "large"), ("other", "small")):
            assert foreign not in (await call(server.app, "GET", path, headers=key_header(key))).body.decode()
    assert (await server.complete("large", key_header("all"))).status == 200
    for name, num_models in (("one", 1), ("all", 2)):
        info = (await call(server.app, "GET", "/server_info", headers=key_header(name))).json()
        assert (info["charged_bytes"], len(info["models"])) == (num_models * GIB, num_models)
    assert (await server.complete("small")).status == 401


async def test_an_answer_is_found_by_its_id_whichever_model_has_it():
    server = Setup()
    created = await call(server.app, "POST", "/v1/responses", {"model": "large", "input": "a"})
    path = f"/v1/responses/{created.json()['id']}"
    await server.complete("small")
    assert (await call(server.app, "GET", path)).json()["id"] == created.json()["id"]
    await server.pool._unload(server.pool.models[1])
    assert (await call(server.app, "GET", path)).status == 200  # it outlives the engine
    assert (await call(server.app, "DELETE", path)).status == 200
    assert (await call(server.app, "GET", path)).status == 404
    missing = await call(server.app, "GET", "/v1/streams/none")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "not_found")


async def test_a_crash_of_one_model_touches_no_other():
    server = Setup()
    for name in ("small", "large"):
        assert (await server.complete(name)).status == 200
    server.hosts["large"].engine.is_dead = True
    assert (await server.complete("large")).status == 503
    await server.pool.tick()
    assert await server.statuses() == {"small": "loaded", "gpt-4o": "loaded", "large": "failed"}
    assert (await server.complete("small")).status == 200
    refused = await server.complete("large")
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    assert (await call(server.app, "GET", "/health")).json() == {"status": "Ready"}


async def test_a_form_names_its_model_before_its_file():
    server = Setup()
    parts = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nlarge\r\n',
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n',
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    path = "/v1/audio/transcriptions"
    refused = await call(server.app, "POST", path, b"".join(parts), headers)
    assert "transcribe" in refused.json()["error"]["message"]  # the model has said so
    assert server.hosts["large"].num_starts == 1
    named = parts[1].replace(b"a.wav", b"model")  # no file is taken for the name
    for body in (parts[1], named, b'name="model"\r\n' * 4000):
        nameless = await call(server.app, "POST", path, body, headers)
        assert (nameless.status, nameless.json()["error"]["param"]) == (400, "model")
    assert (await call(server.app, "POST", f"{path}?model=small", parts[1], headers)).status != 200
    assert server.hosts["small"].num_starts == 1


async def test_metrics_name_their_models_and_docs_have_all_routes():
    server = Setup()
    await server.complete("large")
    text = (await call(server.app, "GET", "/metrics")).body.decode()
    assert 'llmstack:model_state{model_name="large",state="loaded"} 1.0' in text
    assert 'llmstack:model_loads_total{model_name="large"} 1.0' in text
    assert 'llmstack:engine_restarts_total{model_name="large"} 0.0' in text
    assert 'llmstack:http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text
    paths = (await call(server.app, "GET", "/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/api/ps", "/v1/responses/{response_id}", "/server_info"} <= paths.keys()
    page = await call(server.app, "GET", "/")
    assert (page.status, b'href="live"' in page.body) == (200, False)
    info = (await call(server.app, "GET", "/server_info")).json()
    assert (info["memory_bytes"], info["charged_bytes"]) == (2 * GIB, GIB)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1", "/is_sleeping", "/v1/reload", "/update_weights"])
async def test_no_option_is_advised_that_several_models_refuse(path: str):
    error = (await call(Setup().app, "GET", path)).json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"].endswith("A server with several models does not have this route.")


async def test_a_server_that_drains_loads_nothing():
    server = Setup()
    server.state.lifecycle.advance(LifecycleState.DRAINING)
    refused = await server.complete("small")
    assert (refused.status, refused.json()["error"]["code"]) == (503, "server_shutting_down")
    assert server.hosts["small"].num_starts == 0
    assert (await call(server.app, "GET", "/health")).status == 200
    assert (await call(server.app, "GET", "/ready")).status == 503


async def test_an_operator_controls_one_model_by_its_name():
    server = Setup(HTTPConfig(enable_control_routes=True, has_live_page=False))
    nameless = await call(server.app, "POST", "/reset_prefix_cache")
    assert (nameless.status, nameless.json()["error"]["param"]) == (400, "model")
    away = await call(server.app, "POST", "/reset_prefix_cache?model=large")
    assert (away.status, server.hosts["large"].num_starts) == (503, 0)  # nothing is loaded to be controlled
    await server.complete("large")
    assert (await call(server.app, "POST", "/reset_prefix_cache?model=large")).status == 200
    assert (await call(server.app, "POST", "/pause?model=large")).status == 200
    assert (await server.complete("large")).status == 503
    assert (await server.complete("small")).status == 200
    assert (await call(server.app, "POST", "/resume?model=large")).status == 200
    assert (await server.complete("large")).status == 200


async def test_every_route_of_a_model_answers_for_the_one_that_the_query_names():
    server = Setup()
    names = [route.path for route, _ in server.app.table.routes]
    assert {"/infill", "/v1/decisions", "/v1/chat/completions", "/api/show"} <= set(names)
    for route, spec in server.app.table.routes:
        if "{" in spec.path or spec.path in ("/docs", "/openapi.json"):
            continue
        method = spec.methods.split()[-1]
        answer = await call(server.app, method, f"{spec.path}?model=large", {} if method == "POST" else None)
        assert answer.status in (200, 400, 404, 415, 426, 501), (route, answer.status, answer.body)
        assert b"several models" not in answer.body
    for path, status in (("/api/chat", 404), ("/v1/chat/completions", 415)):
        assert (await call(server.app, "POST", path, b'{"model": "other"}', {"content-type": None})).status == status
    assert server.hosts["small"].num_starts == 0


@pytest.mark.parametrize("is_posted", [False, True])
async def test_a_session_is_given_up_in_every_model_that_has_turns_of_it(is_posted: bool):
    http = HTTPConfig(api_keys=tuple(map(Secret, ("all", "few"))), key_to_models={Secret("few"): frozenset({"small"})})
    server = Setup(http)

    async def release(key: str) -> Any:
        method, path, body = ("POST", "/close_session", {"session_id": "s"}) if is_posted else (
            "DELETE", "/v1/sessions/s", None
        )  # fmt: skip
        return await call(server.app, method, path, body, key_header(key))

    assert (await release("all")).status == 404  # no model is loaded, and none is for this
    assert set((await server.statuses("all")).values()) == {"unloaded"}
    for name in ("small", "large"):
        assert (await server.complete(name, key_header("all"))).status == 200
        server.hosts[name].engine.released = (1, 160)
    answer = await release("all")
    assert (answer.status, answer.json()["released_tokens"]) == (200, 320)
    assert (await release("few")).json()["released_tokens"] == 160  # of the one model that there is for this key
    names = [[operation[1:] for operation in host.engine.operations] for host in server.hosts.values()]
    mine, other = ((server.tenant_of(key), "s") for key in ("all", "few"))
    assert names == [[mine, other], [mine]]
