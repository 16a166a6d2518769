"""Readers of `/live/events`: what each of them may see, and what many of them cost."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from server_helpers.live import KEYS, kept_steps, read_once

from llmstack_engine_client.prediction import FirstToken
from llmstack_server.app import build_app, live_feed, live_page
from llmstack_server.app.live_feed import LiveFeed, Position
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.state.first_tokens import PendingRequest
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import READY, FakeEngineClient, call, ready_state
from llmstack_server.web.clients import Client
from llmstack_server.web.errors import HTTPError
from llmstack_types import EngineDeadError, ScheduledRequest, ShadowReport, StepRecord, StepRecording


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_S", 0.0)


def predicted(tenant: str) -> PendingRequest:
    return PendingRequest(1, tenant, None, submitted_s=time.monotonic(), prediction=FirstToken(0.0, 0.25))


def step(number: int, *rows: ScheduledRequest) -> StepRecord:
    record = kept_steps().steps[0]
    return record._replace(stats=record.stats._replace(step=number), rows=rows)


def with_steps_of_others(state: ServerState) -> StepRecording:
    """Two requests of different keys, each alone in one more step."""
    log = kept_steps(state)
    return log._replace(steps=[
        *log.steps,
        step(4, ScheduledRequest("other", 7777, 8888, [9999])),
        step(5, ScheduledRequest("mine", 9, 1, [])),
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("key", "name", "numbers"), [("first-key", "mine", [1, 2, 3, 5]), ("second-key", "other", [1, 2, 3, 4])]
)
async def test_a_key_sees_its_own_requests_alone(key: str, name: str, numbers: list[int]) -> None:
    state = ready_state(engine := FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    engine.last_steps = with_steps_of_others(state)
    state.config = replace(state.config, reload=ReloadOptions(reload_models=("next=/models/next",)))
    state.metrics.shadows.record(0, ShadowReport("policy=fair"))
    for one, tenant in engine.last_steps.tenants.items():
        state.recent_requests.note(one, predicted(tenant))
    part = await read_once(state, key=key)
    assert [row[0] for row in part["steps"]] == numbers
    # Running requests and tokens are its own; waiting ones, blocks and preemptions are left out.
    assert {tuple(row[3:8]) for row in part["steps"]} == {(1, None, None, None, None)}
    own_tokens = {"mine": [4, 1, 1, 1], "other": [1, 1, 1, 8888]}[name]
    assert [row[8] for row in part["steps"]] == own_tokens
    for kind in ("runs", "events", "predictions"):
        assert {row[0] for row in part[kind]} == {name}
    assert {tuple(run[7]) for run in part["runs"]} == {()}
    assert part["weights"] == {"name": "start", "num_finishing": None}
    assert "shadow" not in part
    others = {"mine": ("other", "8888", "7777", "9999"), "other": ("mine", "9999")}[name]
    assert not [word for word in others if word in json.dumps(part)]


async def test_an_operator_and_the_key_of_a_server_with_one_see_all() -> None:
    for http, key in (
        (HTTPConfig(api_keys=KEYS, operator_keys=frozenset(KEYS[:1])), "first-key"),
        (HTTPConfig(api_keys=KEYS[1:]), "second-key"),
        (HTTPConfig(), None),
    ):
        state = ready_state(engine := FakeEngineClient(), http)
        engine.last_steps = kept_steps(state)
        part = await read_once(state, key=key)
        assert {run[0] for run in part["runs"]} == {"mine", "other"}
        assert [row[3:8] for row in part["steps"]] == [[2, 0, 3, 8, 0]] * 3


async def test_a_key_gets_no_part_for_the_steps_of_others() -> None:
    state = ready_state(engine := FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    engine.last_steps = kept_steps(state)
    mine, _ = engine.last_steps.tenants.values()
    feed = LiveFeed(state, 0)
    feed._due_s = float("inf")  # no part is due
    first = await feed.first_part(Position("", 0))
    assert b'"mine"' in first.frame(mine)
    log = engine.last_steps
    engine.last_steps = log._replace(steps=[*log.steps, step(4, ScheduledRequest("other", 5, 1, []))], events=[])
    part = await feed.part_after(first.after)
    assert part.frame(mine) == b""
    assert b'"other"' in part.frame(None)
    assert part.after.step == 4


async def test_a_gap_names_no_step_of_another_key() -> None:
    state = ready_state(engine := FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    engine.last_steps = with_steps_of_others(state)._replace(events=[])
    engine.last_steps = engine.last_steps._replace(steps=engine.last_steps.steps[3:])
    engine.engines = [replace(READY, pid=8)]
    part = await read_once(state, "/live/events?engine=0&after=2&core=0123", "first-key")
    assert part["gap"] == {"reason": "engine_core_replaced", "after": 2, "next": 5}


class Counting(FakeEngineClient):
    """Counts how often its steps are read; every read finds one more."""

    num_reads = 0

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        self.num_reads += 1
        await asyncio.sleep(0)
        log = kept_steps()
        self.last_steps = log._replace(
            steps=[step(number, *log.steps[0].rows) for number in range(1, self.num_reads + 2)]
        )
        return await super().recent_steps(after_step, engine_index)


async def test_a_step_is_read_and_encoded_once_for_all_readers() -> None:
    state = ready_state(engine := Counting())
    feed = LiveFeed(state, 0)
    firsts = [await feed.first_part(Position("", 0)) for _ in range(8)]
    positions = [part.after for part in firsts]
    aligned = await asyncio.gather(*map(feed.part_after, positions))
    before = engine.num_reads
    parts = await asyncio.gather(*(feed.part_after(part.after) for part in aligned))
    assert engine.num_reads == before + 1
    assert len({id(part.frame(None)) for part in parts}) == 1


async def test_a_reader_that_was_slow_misses_nothing() -> None:
    state = ready_state(Counting())
    feed = LiveFeed(state, 0)
    slow = quick = await feed.first_part(Position("", 0))
    seen = [record.stats.step for record in slow.found.log.steps]
    for _ in range(5):
        quick = await feed.part_after(quick.after)
    for _ in range(3):
        slow = await feed.part_after(slow.after)
        seen += [record.stats.step for record in slow.found.log.steps]
    assert seen == list(range(1, slow.after.step + 1))
    assert slow.found.gap is None


def test_readers_of_one_key_take_no_place_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = live_page._Readers()
    mine, other, operator = Client("mine"), Client("other"), Client("operator", is_operator=True)

    def has_room(client: Client) -> bool:
        with suppress(HTTPError), readers.counted(client):
            return True
        return False

    with ExitStack() as streams:
        for _ in range(live_page.MAX_PER_KEY - 1):
            streams.enter_context(readers.counted(mine))
        with readers.counted(mine):
            assert not has_room(mine)
            assert has_room(other)
            assert has_room(operator)
            monkeypatch.setattr(live_page, "MAX_OTHERS", live_page.MAX_PER_KEY)
            assert not has_room(other)
            assert has_room(operator)
        assert has_room(mine)


async def test_readers_that_come_at_once_are_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MAX_OPERATORS", 2)
    state = ready_state(engine := FakeEngineClient())
    engine.last_steps = kept_steps(state)
    app = build_app(state)
    calls = asyncio.gather(*(call(app, "GET", "/live/events") for _ in range(5)))
    await asyncio.sleep(0.1)
    state.lifecycle.advance(LifecycleState.DRAINING)
    assert sorted(answer.status for answer in await calls) == [200, 200, 503, 503, 503]


async def test_one_reader_too_many_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "MAX_OPERATORS", 0)
    answer = await call(build_app(ready_state(FakeEngineClient())), "GET", "/live/events")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert "retry-after" in answer.headers


class Replicas(FakeEngineClient):
    """Two engine cores; the second one is gone."""

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        if engine_index:
            raise EngineDeadError("gone")
        return await super().recent_steps(after_step, engine_index)


async def read_all(state: ServerState, path: str) -> list[dict[str, Any]]:
    app, read = build_app(state), state.engine.recent_steps
    num_reads = 0

    async def counted(after_step: int = 0, engine_index: int = 0) -> StepRecording:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 4:
            state.lifecycle.advance(LifecycleState.DRAINING)
        return await read(after_step, engine_index)

    state.engine.recent_steps = counted  # type: ignore[method-assign]
    answer = await call(app, "GET", path)
    return [json.loads(line[5:]) for line in answer.body.decode().splitlines() if line.startswith("data:")]


@pytest.mark.parametrize(("kind", "engines"), [(FakeEngineClient, {0, 1}), (Replicas, {0})])
async def test_one_stream_follows_all_engine_cores_that_are_there(
    kind: type[FakeEngineClient], engines: set[int]
) -> None:
    state = ready_state(engine := kind())
    engine.last_steps = kept_steps()
    engine.engines = [replace(READY, engine_index=index) for index in range(2)]
    parts = await read_all(state, "/live/events?after=,2")
    assert {part["engine"] for part in parts} == engines
    assert {part["num_engines"] for part in parts} == {2}
    first = {part["engine"]: [row[0] for row in part["steps"]] for part in reversed(parts)}
    assert first[0] == [1, 2, 3]
    assert first.get(1, [3]) == [3]


async def test_a_stream_ends_with_an_error_when_every_engine_core_is_gone() -> None:
    state = ready_state(engine := Replicas())
    engine.engines = [replace(READY, engine_index=index) for index in range(2)]
    (part,) = await read_all(state, "/live/events?engine=1")
    assert part["error"]["code"]


@pytest.mark.parametrize("query", ["after=1,2", "after=x", "core=a,b"])
async def test_odd_positions_are_refused(query: str) -> None:
    answer = await call(build_app(ready_state(FakeEngineClient())), "GET", f"/live/events?{query}")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "after")
