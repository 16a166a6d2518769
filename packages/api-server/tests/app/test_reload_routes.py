"""Weights are exchanged over HTTP while requests run, with real engine cores that echo."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from server_helpers.reloading import Seen, serving
from server_helpers.waiting import wait_until

from llmstack_llm.testing import byte_tokenizer, write_model_folder
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.testing.adapters import write_adapter

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}


def text_of(events: list[Any]) -> str:
    """The text of a streamed completion; its last event is no object."""
    return "".join(event["choices"][0]["text"] for event in events if isinstance(event, dict) and event["choices"])


async def test_a_stream_ends_with_the_old_weights_and_the_next_answer_has_the_new_ones(tmp_path: Path) -> None:
    # The options of the runner that echoes are in the name of its folder.
    first = write_model_folder(tmp_path / "m?step_delay_s=0.02")
    other = write_model_folder(tmp_path / "other", generation_config={"max_new_tokens": 5})
    stranger = write_model_folder(tmp_path / "stranger", tokenizer=byte_tokenizer(("<|endoftext|>", "<new>")))
    failing = write_model_folder(tmp_path / "m?load_error=no such weights")
    texts = (f"next={other}", f"stranger={stranger}", f"failing={failing}", f"gone={tmp_path / 'gone'}")
    async with serving(first, *texts) as (app, llm):
        llm.add_observer(seen := Seen())
        body = {"prompt": "Hello", "max_tokens": 100, "stream": True}
        running = asyncio.create_task(call(app, "POST", "/v1/completions", body))
        await wait_until(lambda: seen.request_ids)
        first_pid = llm.engines[0].pid
        os.kill(first_pid, signal.SIGSTOP)  # its request ends after all that follows
        for name, text in (("stranger", "tokenizer"), ("failing", "no such weights"), ("gone", "gone")):
            refused = await call(app, "POST", "/v1/reload", {"name": name})
            error = refused.json()["error"]
            assert (refused.status, error["code"]) == (409, "reload_failed"), error
            assert refused.headers["x-should-retry"] == "false"
            assert text in error["message"]
        before = (await call(app, "GET", "/v1/models")).json()["data"][0]
        assert (before["weights"]["name"], before["previous_weights"]) == ("start", [])

        answer = await call(app, "POST", "/v1/reload", {"name": "next"})
        assert (answer.status, answer.json()["num_finishing_requests"]) == (200, 1)
        assert not running.done()
        again = await call(app, "POST", "/v1/reload", {"name": "start"})
        assert (again.status, "still run" in again.json()["error"]["message"]) == (409, True)
        new = (await call(app, "POST", "/v1/completions", {"prompt": "Hello"})).json()
        assert new["choices"][0]["text"] == "Hello", "the next model's own default is five tokens"
        os.kill(first_pid, signal.SIGCONT)
        events = [event for event in (await running).events() if isinstance(event, dict)]
        assert text_of(events) == "Hello" * 20
        after = (await call(app, "GET", "/v1/models")).json()["data"][0]
        assert after["weights"] == answer.json()["weights"]
        assert after["previous_weights"] == [before["weights"]]
        old = {event["system_fingerprint"] for event in events if "system_fingerprint" in event}
        assert old == {before["weights"]["system_fingerprint"]}
        assert new["system_fingerprint"] == after["weights"]["system_fingerprint"]
        assert new["system_fingerprint"] not in old


async def test_memory_is_checked_first_and_running_requests_may_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model_folder(tmp_path / "m?step_delay_s=0.01")
    other = write_model_folder(tmp_path / "m?load_error=was started")
    monkeypatch.setattr("llmstack_llm.reloading.find_memory_problem", lambda config: "no room")
    write_adapter(tmp_path / "style")
    adapters = {"name": "styled", "lora_modules": {"style": str(tmp_path / "style")}}
    broken = {"name": "broken", "lora_modules": {"tone": str(tmp_path)}}
    short = {"name": "short", "max_model_len": 64}
    entries = [f"next={other}", *map(json.dumps, (adapters, broken, short))]
    async with serving(folder, *entries) as (app, llm):
        pid = llm.engines[0].pid
        refused = await call(app, "POST", "/v1/reload", {"name": "next", "running": "move"})
        assert (refused.status, "no room" in refused.json()["error"]["message"]) == (409, True)
        assert llm.engines[0].pid == pid

        # Without room the next one starts in the place of the old one, which here has to start again.
        failed = await call(app, "POST", "/v1/reload", {"name": "next"})
        assert (failed.status, "was started" in failed.json()["error"]["message"]) == (409, True)
        before, pid = pid, llm.engines[0].pid
        assert before != pid

        # A set of adapters needs no second engine core.
        assert (await call(app, "POST", "/v1/reload", {"name": "styled"})).status == 200
        assert [one["id"] for one in (await call(app, "GET", "/v1/models")).json()["data"]] == ["fake", "style"]
        # The runner that echoes does so backwards for an adapter.
        styled = await call(app, "POST", "/v1/completions", {"model": "style", "prompt": "Hi", "max_tokens": 2})
        assert styled.json()["choices"][0]["text"] == "iH"
        refused = await call(app, "POST", "/v1/reload", {"name": "broken"})
        assert (refused.status, "adapter tone" in refused.json()["error"]["message"]) == (409, True)
        assert [one.name for one in llm.adapters.adapters] == ["style"]
        assert llm.engines[0].pid == pid

        # The next engine core has the adapters, too, and what moves there goes on after its last token.
        monkeypatch.setattr("llmstack_llm.reloading.find_memory_problem", lambda config: "")
        llm.add_observer(seen := Seen())
        body = {"prompt": "Hello", "max_tokens": 100, "stream": True}
        running = asyncio.create_task(call(app, "POST", "/v1/completions", body))
        await wait_until(lambda: seen.request_ids)
        os.kill(pid, signal.SIGSTOP)  # only another engine core can end the stream
        refused = await call(app, "POST", "/v1/reload", {"name": "short", "running": "move"})
        assert (refused.status, "64 is the limit" in refused.json()["error"]["message"]) == (409, True)
        moved = await call(app, "POST", "/v1/reload", {"name": "start", "running": "move"})
        assert (moved.json()["num_moved_requests"], moved.json()["num_finishing_requests"]) == (1, 0)
        assert llm.engines[0].pid != pid
        assert text_of((await running).events()) == "Hello" * 20
        again = await call(app, "POST", "/v1/completions", {"model": "style", "prompt": "Hi", "max_tokens": 2})
        assert again.json()["choices"][0]["text"] == "iH"


async def test_a_request_that_waits_for_the_next_engine_core_names_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = (write_model_folder(tmp_path / f"{name}?step_delay_s=0.01") for name in ("m", "other"))
    monkeypatch.setattr("llmstack_llm.reloading.find_memory_problem", lambda config: "no room")
    async with serving(folder, f"next={other}") as (app, llm):
        llm.add_observer(seen := Seen())
        body = {"prompt": "Hello", "max_tokens": 100}
        running = asyncio.create_task(call(app, "POST", "/v1/completions", body | {"stream": True}))
        await wait_until(lambda: seen.request_ids)
        os.kill(llm.engines[0].pid, signal.SIGSTOP)  # the request ends after the next ones have come
        reload = asyncio.create_task(call(app, "POST", "/v1/reload", {"name": "next"}))
        await wait_until(lambda: llm.is_exchanging)
        held = [asyncio.create_task(call(app, "POST", path, fields)) for path, fields in (
            ("/v1/completions", body), ("/v1/chat/completions", CHAT),
        )]  # fmt: skip
        await wait_until(lambda: llm.num_requests_in_flight == 3)
        os.kill(llm.engines[0].pid, signal.SIGCONT)
        weights = (await reload).json()["weights"]
        *_, last, _ = (await running).events()
        assert last["system_fingerprint"] != weights["system_fingerprint"]
        found = {(await one).json()["system_fingerprint"] for one in held}
        assert found == {weights["system_fingerprint"]}


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_stream_that_moves_keeps_an_adapter_that_the_next_set_lacks_or_ends_with_an_error(
    tmp_path: Path, *, is_there: bool
) -> None:
    folder = write_model_folder(tmp_path / "m?step_delay_s=0.01")
    adapter = write_adapter(tmp_path / "style")
    entries = (
        {"name": "styled", "lora_modules": {"style": str(adapter)}},
        {"name": "plain", "num_kv_blocks": 64, "lora_modules": {}},
    )
    async with serving(folder, *map(json.dumps, entries)) as (app, llm):
        assert (await call(app, "POST", "/v1/reload", {"name": "styled"})).status == 200
        llm.add_observer(seen := Seen())
        body = {"model": "style", "prompt": "Hello", "max_tokens": 100, "stream": True}
        running = asyncio.create_task(call(app, "POST", "/v1/completions", body))
        await wait_until(lambda: seen.request_ids)
        os.kill(llm.engines[0].pid, signal.SIGSTOP)  # only another engine core can end the stream
        if not is_there:
            shutil.rmtree(adapter)
        moved = await call(app, "POST", "/v1/reload", {"name": "plain", "running": "move"})
        assert moved.json()["num_moved_requests"] == 1
        events = (await running).events()
        text = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
        assert text == ("elloH" * 20)[: len(text)]  # without the adapter it would begin with H
        assert (len(text) == 100, "error" in events[-1]) == (is_there, not is_there)
        later = await call(app, "POST", "/v1/completions", body)
        assert (later.status, later.json()["error"]["code"]) == (404, "model_not_found")


async def test_bodies_name_an_entry_of_the_list_and_never_a_path(tmp_path: Path) -> None:
    state = ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True))
    state.config = dataclasses.replace(state.config, reload=ReloadOptions(reload_models=(f"next={tmp_path}",)))
    app = build_app(state)
    for body, param in (
        ({"name": str(tmp_path)}, "name"),
        ({"name": "next", "model": str(tmp_path)}, "model"),
        ({"name": "next", "running": "abort"}, "running"),
    ):
        answer = await call(app, "POST", "/v1/reload", body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    cannot = await call(app, "POST", "/v1/reload", {"name": "next"})
    assert (cannot.status, cannot.json()["error"]["code"]) == (409, "reload_failed")
    state.config = dataclasses.replace(state.config, reload=ReloadOptions())
    assert (await call(build_app(state), "POST", "/v1/reload", {"name": "next"})).status == 404


async def test_weights_are_exchanged_while_a_crashed_engine_core_is_replaced(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m?load_delay_s=1")
    other = write_model_folder(tmp_path / "other", generation_config={"max_new_tokens": 5})
    async with serving(folder, f"next={other}") as (app, llm):
        os.kill(llm.engines[0].pid, signal.SIGKILL)
        await wait_until(lambda: not llm.engines)
        answer = await call(app, "POST", "/v1/reload", {"name": "next"})
        assert answer.status == 200, answer.json()
        new = (await call(app, "POST", "/v1/completions", {"prompt": "Hello"})).json()
        assert new["choices"][0]["text"] == "Hello"
