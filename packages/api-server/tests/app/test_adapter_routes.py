"""LoRA adapters over HTTP: loaded from one folder by operators, listed, and named as models in every route."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.app.adapter_routes import load_configured_adapters
from llmstack_server.options.adapter_options import AdapterNames, read_module
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.testing.adapters import write_adapter
from llmstack_types import InvalidRequestError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MESSAGES = [{"role": "user", "content": "hi"}]


class Server:
    def __init__(self, root: Path, *modules: str, has_control_routes: bool = True) -> None:
        self.engine = FakeEngineClient()
        self.root = root
        self.state = ready_state(self.engine, HTTPConfig(enable_control_routes=has_control_routes))
        adapters = AdapterNames(modules=modules, root=str(root))
        self.state.config = dataclasses.replace(self.state.config, adapters=adapters)
        self.app = build_app(self.state)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await call(self.app, "POST", path, body)

    async def load(self, name: str = "style", path: str = "style", **fields: Any) -> Any:
        return await self.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


@pytest.fixture
def server(tmp_path: Path) -> Server:
    write_adapter(tmp_path / "root" / "style")
    return Server(tmp_path / "root")


async def test_an_adapter_is_loaded_listed_named_and_unloaded(server: Server) -> None:
    answer = await server.load()
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'style' added successfully.")
    base, adapter = (await call(server.app, "GET", "/v1/models")).json()["data"]
    assert (base["id"], base["parent"], adapter["id"], adapter["parent"]) == ("fake", None, "style", "fake")
    assert adapter["root"] == str(server.root / "style")
    assert (await call(server.app, "GET", "/v1/models/style")).json()["id"] == "style"
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "store": False}),
    ):
        answered = await server.post(path, {"model": "style", **body})
        assert (answered.status, answered.json()["model"]) == (200, "style"), path
        used = server.engine.admitted[-1].adapter
        assert used is not None
        assert used.identity.startswith("style@")
        assert (await server.post(path, {"model": "fake", **body})).status == 200
        assert server.engine.admitted[-1].adapter is None
    assert (await server.post("/tokenize", {"model": "style", "prompt": "a"})).status == 200
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"], "input_type": "classification", "embedding_types": ["float"]}),
    ):
        for model in ("style", "fake"):
            answered = await server.post(path, {"model": model, **body})
            assert (answered.status, answered.json().get("model", model)) == (200, model), path
            pooling = server.engine.pooling_adapter
            assert (pooling and pooling.name) == ("style" if model == "style" else None)
    answer = await server.post(UNLOAD, {"lora_name": "style", "lora_int_id": 1})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'style' removed successfully.")
    gone = await server.post("/v1/completions", {"model": "style", "prompt": "a"})
    assert (gone.status, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert (await server.post(UNLOAD, {"lora_name": "style"})).status == 404


@pytest.mark.parametrize(
    ("path", "body", "last_wait"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "echo": True}, "get_tokenizer"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "submit"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "render"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "submit"),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 1}, "render"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, "render"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, "submit"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "render"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "submit"),
        ("/v1/embeddings", {"messages": MESSAGES}, "render"),
        ("/v1/embeddings", {"input": "a"}, "admit_pooling"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "admit_pooling"),
    ],
)
async def test_a_request_never_runs_without_the_adapter_that_it_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], last_wait: str
) -> None:
    await server.load()
    waits = getattr(server.engine, last_wait)

    async def unload_then_go_on(*args: Any, **options: Any) -> Any:
        await server.engine.unload_adapter("style")
        return await waits(*args, **options)

    monkeypatch.setattr(server.engine, last_wait, unload_then_go_on)
    answered = await server.post(path, {"model": "style", **body})
    assert server.engine.adapters.find("style") is None
    used = [one.adapter for one in server.engine.admitted]
    if last_wait == "submit":  # it has the adapter, and the engine core decides
        assert (answered.status, answered.json()["model"]) == (200, "style")
        assert [one and one.name for one in used] == ["style"]
    elif last_wait == "admit_pooling":
        assert answered.status == 200
        assert server.engine.pooling_adapter is not None
    else:
        error = answered.json()["error"]
        code = error["code"] if "code" in error else error["type"]
        assert (answered.status, code) == (404, "not_found_error" if path == "/v1/messages" else "model_not_found")
        assert used == []


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (LOAD, {"lora_name": "style"}, "lora_path", "missing_required_parameter"),
        (UNLOAD, {}, "lora_name", "missing_required_parameter"),
        (LOAD, {"lora_name": "style", "lora_path": "style", "inplace": True}, "inplace", "unknown_parameter"),
        (LOAD, {"lora_name": 5, "lora_path": "style"}, "lora_name", "invalid_type"),
    ],
)
async def test_missing_and_unknown_fields_are_named(
    server: Server, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    refused = await server.post(path, body)
    error = refused.json()["error"]
    assert (refused.status, error["param"], error["code"]) == (400, param, code)
    assert f"'{param}'" in error["message"]


async def test_a_name_is_loaded_again_only_on_request_and_gets_another_identity(server: Server) -> None:
    await server.load()
    first = server.engine.adapters.find("style")
    again = await server.load()
    assert (again.status, again.json()["error"]["param"]) == (400, "lora_name")
    assert "set 'load_inplace' to True" in again.json()["error"]["message"]
    assert (await server.load(load_inplace=True)).status == 200
    second = server.engine.adapters.find("style")
    assert first is not None
    assert second is not None
    assert first.identity != second.identity


@pytest.mark.parametrize("path", ["../outside", "link", "/etc", ".", "a\0b", "missing"])
async def test_paths_out_of_the_root_are_refused(server: Server, path: str) -> None:
    write_adapter(server.root.parent / "outside")
    (server.root / "link").symlink_to(server.root.parent / "outside")
    refused = await server.load(path=path)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "lora_path")
    assert not refused.json()["error"]["message"].endswith("..")
    assert server.engine.adapters.adapters == []


@pytest.mark.parametrize("name", ["a/b", "", "x" * 65, "ä", "fake", "a@b"])
async def test_names_that_cannot_be_a_model_are_refused(server: Server, name: str) -> None:
    refused = await server.load(name=name)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "lora_name")


async def test_the_routes_are_for_operators(server: Server) -> None:
    closed = Server(server.root, has_control_routes=False)
    assert (await closed.load()).status == 404
    wrong = await server.post(LOAD, {"lora_name": "style", "lora_path": "style", "other": 1})
    assert (wrong.status, wrong.json()["error"]["param"]) == (400, "other")


async def test_adapters_from_the_start_have_a_parent_and_a_bad_one_ends_it(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "anywhere" / "style")
    server = Server(tmp_path, f"style={path}", f'{{"name": "b", "path": "{path}", "base_model_name": "gpt2"}}')
    await load_configured_adapters(server.state)
    listed = (await call(server.app, "GET", "/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("fake", None), ("style", "fake"), ("b", "gpt2")]
    with pytest.raises(InvalidRequestError, match=r"--lora-modules bad: .*no folder"):
        await load_configured_adapters(Server(tmp_path, "bad=missing").state)


async def test_the_adapters_of_requests_in_flight_are_a_metric(server: Server) -> None:
    server.engine.use = ["a", "b"], ["c"]
    text = (await call(server.app, "GET", "/metrics")).body.decode()
    labels = 'max_lora="1",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert f"vllm:lora_requests_info{{{labels}}}" in text
    server.engine.use = [], []
    assert "lora_requests_info{" not in (await call(server.app, "GET", "/metrics")).body.decode()


@pytest.mark.parametrize(
    "text", ["style", "=path", "{", '{"name": "a"}', '{"name": "a", "path": "b", "x": "y"}', '{"name": 1, "path": "b"}']
)
def test_modules_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_module(text)


async def test_of_two_models_at_once_one_gets_the_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Server(server.root)
    other.state.adapters.share_changes(server.state.adapters)
    for one, another in ((server, other), (other, server)):
        registry = another.engine.adapters
        one.state.is_name_taken = lambda name, registry=registry: registry.find(name) is not None
    is_loading, may_go_on, load = asyncio.Event(), asyncio.Event(), server.engine.load_adapter

    async def load_slowly(*arguments: Any, **fields: Any) -> Any:
        is_loading.set()
        await may_go_on.wait()
        return await load(*arguments, **fields)

    monkeypatch.setattr(server.engine, "load_adapter", load_slowly)
    first = asyncio.create_task(server.load())
    await is_loading.wait()
    for answer in (await other.load(), await other.post(UNLOAD, {"lora_name": "style"})):
        assert (answer.status, "is being loaded or unloaded" in answer.json()["error"]["message"]) == (400, True)
    may_go_on.set()
    assert (await first).status == 200
    answer = await other.load()
    assert (answer.status, "another model" in answer.json()["error"]["message"]) == (400, True)
    assert [one.name for one in other.engine.adapters.adapters] == []
    await server.post(UNLOAD, {"lora_name": "style"})
    assert (await other.load()).status == 200
