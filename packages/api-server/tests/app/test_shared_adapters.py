"""Adapters that one API process loads or unloads are those of all processes before the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.adapters import AdapterRegistry
from llmstack_server.app import build_app
from llmstack_server.app.adapter_routes import load_configured_adapters
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.config import HTTPConfig
from llmstack_server.state import shared_adapters
from llmstack_server.state.peers import Peers
from llmstack_server.state.shared_adapters import SharedAdapters
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.testing.adapters import write_adapter
from llmstack_types import InvalidRequestError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Process:
    """An API process of a server with three, on the event loop of the test."""

    def __init__(self, root: Path, index: int) -> None:
        self.engine = FakeEngineClient()
        self.peers = Peers(root / "sockets", index, 3)
        self.state = ready_state(self.engine, HTTPConfig(enable_control_routes=True))
        adapters = AdapterNames(modules=(f"started={root / 'style'}",), root=str(root))
        self.state.config = dataclasses.replace(self.state.config, adapters=adapters)
        self.state.peers = self.peers
        self.app = build_app(self.state)

    async def begin(self) -> None:
        await self.state.adapters.begin(lambda: load_configured_adapters(self.state))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        return await call(self.app, "POST", path, body)

    async def load(self, name: str = "style", **fields: Any) -> Any:
        return await self.post(LOAD, {"lora_name": name, "lora_path": "style", **fields})

    async def unload(self, name: str = "style") -> Any:
        return await self.post(UNLOAD, {"lora_name": name})

    async def names(self) -> list[str]:
        return [one["id"] for one in (await call(self.app, "GET", "/v1/models")).json()["data"]][1:]

    async def serves(self, name: str) -> bool:
        answer = await self.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        used = self.engine.admitted[-1].adapter if answer.status == 200 else None
        return used is not None and used.name == name


@pytest.fixture
async def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "style")
    (tmp_path / "sockets").mkdir()
    return tmp_path


@pytest.fixture
async def running(root: Path) -> AsyncIterator[list[Process]]:
    """Two of the three processes, that have begun together."""
    async with AsyncExitStack() as stack:
        made = [Process(root, index) for index in range(2)]
        for process in made:
            await stack.enter_async_context(process.peers)
        await asyncio.gather(*(process.begin() for process in made))
        yield made


def identities(process: Process) -> list[str]:
    return sorted(one.identity for one in process.engine.adapters.adapters)


async def test_a_change_is_that_of_all_processes_when_it_is_answered(running: list[Process]) -> None:
    first, second = running
    assert (await first.load()).status == 200
    assert await first.names() == await second.names() == ["started", "style"]
    assert await second.serves("style")
    again = await second.load()
    assert (again.status, again.json()["error"]["param"]) == (400, "lora_name")
    before = identities(first)
    assert (await second.load(load_inplace=True)).status == 200
    assert identities(first) == identities(second) != before
    assert (await first.unload()).status == 200
    assert await first.names() == await second.names() == ["started"]
    assert not await second.serves("style")
    assert (await second.unload()).status == 404
    assert (await first.load()).status == 200
    assert {*before}.isdisjoint(set(identities(second)) - set(identities(first)))
    assert identities(first) == identities(second) != before


async def test_one_name_changes_in_one_process_at_a_time(
    running: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = running
    is_reading, may_go_on = asyncio.Event(), asyncio.Event()
    load = first.engine.load_adapter

    async def load_slowly(*arguments: Any, **fields: Any) -> Any:
        is_reading.set()
        await may_go_on.wait()
        return await load(*arguments, **fields)

    monkeypatch.setattr(first.engine, "load_adapter", load_slowly)
    loading = asyncio.create_task(first.load())
    await is_reading.wait()
    for process in running:
        for refused in (await process.load(), await process.unload()):
            assert "is being loaded or unloaded" in refused.json()["error"]["message"]
    assert (await second.load("other")).status == 200
    may_go_on.set()
    assert (await loading).status == 200
    assert await second.names() == ["started", "other", "style"]
    assert (await second.unload()).status == 200
    assert await first.names() == ["started", "other"]


class MeetingPeers:
    """The other one of two processes; both ask before either is answered."""

    def __init__(self, index: int, meeting: asyncio.Barrier) -> None:
        self.index = index
        self.meeting = meeting
        self.answer_of_other: Any = None
        self.answer: Any = None

    def add_topic(self, word: str, answer: Any) -> None:
        self.answer = answer

    async def ask_all(self, question: str, timeout_s: float) -> list[Any]:
        await self.meeting.wait()
        return [await self.answer_of_other(question.removeprefix("adapters "))]


async def test_of_two_changes_at_once_that_of_the_lower_index_is_done() -> None:
    meeting = asyncio.Barrier(2)
    both = [MeetingPeers(index, meeting) for index in range(2)]
    shared = [SharedAdapters() for _ in both]
    for peers, adapters in zip(both, shared, strict=True):
        adapters.share(peers, lambda: None)  # type: ignore[arg-type]  # the methods that are used
    for peers, other in zip(both, reversed(both), strict=True):
        peers.answer_of_other = other.answer

    async def change(adapters: SharedAdapters) -> None:
        async with adapters.changing("style"):
            await asyncio.sleep(0)

    for _ in range(2):  # and nothing is left of the first time
        done = await asyncio.gather(*map(change, shared), return_exceptions=True)
        assert done[0] is None
        assert isinstance(done[1], InvalidRequestError)


async def test_a_process_that_starts_later_has_the_adapters_of_those_that_run(
    running: list[Process], root: Path
) -> None:
    first, _ = running
    await first.load()
    await first.unload("started")
    late = Process(root, 2)
    async with late.peers:
        assert (await first.load("meanwhile")).status == 200
        await late.begin()
        assert await late.names() == await first.names() == ["style", "meanwhile"]
        assert identities(late) == identities(first)
        assert (await late.unload("style")).status == 200
        assert await first.names() == ["meanwhile"]


async def test_a_process_that_does_not_answer_is_an_error_that_is_bounded(
    running: list[Process], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = running
    with socket.socket(socket.AF_UNIX) as silent, monkeypatch.context() as patch:
        patch.setattr(shared_adapters, "PUBLISH_TIMEOUT_S", 0.05)
        silent.bind(str(root / "sockets" / "api-2.sock"))
        silent.listen()
        answer = await first.load()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    (root / "sockets" / "api-2.sock").unlink()
    assert (await first.load("next")).status == 200
    assert await second.names() == await first.names() == ["started", "next"]


def test_registries_become_equal_in_any_order(root: Path) -> None:
    one, other = AdapterRegistry(is_enabled=True), AdapterRegistry(is_enabled=True)
    one.add(one.identify("a", str(root / "style")))
    early = one.snapshot()
    one.add(one.identify("a", str(root / "style")))
    one.add(one.identify("b", str(root / "style")))
    one.remove("b")
    late = one.snapshot()
    for snapshot in (late, early, late):
        other.merge(snapshot)
        assert other.adapters == one.adapters
    other.add(other.identify("b", str(root / "style")))
    one.merge(other.snapshot())
    one.merge(early)
    assert one.adapters == other.adapters
    assert [adapter.name for adapter in one.adapters] == ["a", "b"]
