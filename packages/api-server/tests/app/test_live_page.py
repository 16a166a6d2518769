"""`/live`: a page that draws the steps, and the stream that feeds it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_helpers.live import KEYS, kept_steps, read_once

from llmstack_engine_client.prediction import FirstToken
from llmstack_server.app import build_app, explain_routes, live_feed
from llmstack_server.app.steps import core_name
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.state.first_tokens import PendingRequest
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.peers import Peers
from llmstack_server.state.recent_requests import RecentRequests
from llmstack_server.testing import READY, FakeEngineClient, call, ready_state
from llmstack_server.web.clients import clients_of
from llmstack_server.web.errors import HTTPError
from llmstack_types import (
    RequestEvent,
    RequestStatus,
    ScheduledRequest,
    SchedulerStats,
    ShadowReport,
    StepPhases,
    StepRecord,
    StepRecording,
)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "INTERVAL_S", 0.0)


async def test_the_page_loads_nothing_and_its_policy_allows_nothing_else() -> None:
    answer = await call(build_app(ready_state(FakeEngineClient())), "GET", "/live")
    page = answer.body.decode()
    assert answer.status == 200
    assert len(answer.body) < 60_000
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert '<script id="timeline" type="application/json">null</script>' in page
    for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "Storage", "cookie"):
        assert word not in page


async def test_without_the_chat_page_there_is_none_either() -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(has_chat_page=False)))
    assert (await call(app, "GET", "/live")).status == 404


async def test_with_keys_the_page_asks_for_one_and_its_stream_needs_one() -> None:
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(api_keys=KEYS)))
    page = await call(app, "GET", "/live", headers={"accept": "text/html"})
    assert (page.status, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert (await call(app, "GET", "/live/events")).json()["error"]["code"] == "missing_api_key"


async def test_the_stream_has_steps_runs_and_events() -> None:
    state = ready_state(engine := FakeEngineClient())
    engine.last_steps = kept_steps()
    part = await read_once(state)
    assert part["num_engines"] == 1
    assert [step[0] for step in part["steps"]] == [1, 2, 3]
    assert part["runs"] == [
        ["other", 1, 3, "d", 3, 0, 0, []], ["mine", 1, 1, "p", 4, 0, 3, [5]], ["mine", 2, 3, "d", 2, 0, 3, [5, 5]],
    ]  # fmt: skip
    assert [event[0] for event in part["events"]] == ["mine", "other"]


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_late_answer_moves_no_event(is_ours: bool) -> None:
    state = ready_state(engine := FakeEngineClient())
    log, num_reads = kept_steps(), 0

    async def read(after_step: int = 0, engine_index: int = 0) -> StepRecording:
        nonlocal num_reads
        num_reads += 1
        now_s = time.monotonic() if is_ours else 20.0 + num_reads  # the second answer is a second late
        event = RequestEvent("mine", RequestStatus.RUNNING, now_s - num_reads)
        await asyncio.sleep(0.05 * num_reads)
        if num_reads == 2:
            state.lifecycle.advance(LifecycleState.DRAINING)
        steps = [step._replace(stats=step.stats._replace(step=num_reads)) for step in log.steps[:1]]
        return log._replace(now_s=now_s, steps=steps, events=[*log.events, event])

    engine.recent_steps = read  # type: ignore[method-assign]
    answer = await call(build_app(state), "GET", "/live/events")
    parts = [json.loads(line[5:]) for line in answer.body.decode().splitlines() if line]
    first, second = (part["events"][0] for part in parts)
    assert first == second
    assert abs(parts[1]["events"][-1][1] - time.time()) < 60


async def test_operators_alone_see_what_a_shadow_has_found() -> None:
    state = ready_state(FakeEngineClient())
    state.metrics.shadows.record(0, ShadowReport("policy=fair"))
    part = await read_once(state)
    assert part["shadow"]["name"] == "policy=fair"
    assert (await read_once(ready_state(FakeEngineClient())))["shadow"] is None


async def test_it_goes_on_after_a_step() -> None:
    state = ready_state(engine := FakeEngineClient())
    engine.last_steps = kept_steps()
    part = await read_once(state, "/live/events?after=2")
    assert [step[0] for step in part["steps"]] == [3]


async def test_the_steps_of_another_engine_core_are_sent_from_its_first() -> None:
    cores: set[str] = set()
    for pid, is_known, numbers in ((7, False, [3]), (7, True, [3]), (8, True, [1, 2, 3])):
        state = ready_state(engine := FakeEngineClient())
        state.config = replace(state.config, deployment_secret=b"shared by the processes")
        engine.last_steps, engine.engines = kept_steps(), [replace(READY, pid=pid)]
        core = f"&core={cores.pop()}" if is_known else ""
        part = await read_once(state, f"/live/events?after=2{core}")
        assert [step[0] for step in part["steps"]] == numbers
        cores = {part["core"]}


async def test_where_weights_can_change_it_says_which_answer() -> None:
    state = ready_state(FakeEngineClient())
    assert (await read_once(state))["weights"] is None
    state = ready_state(FakeEngineClient())
    state.config = replace(state.config, reload=ReloadOptions(reload_models=("next=/models/next",)))
    state.weights_name = "next"
    assert (await read_once(state))["weights"] == {"name": "next", "num_finishing": 0}


async def test_a_reader_that_fell_behind_gets_the_numbers_of_missing_steps() -> None:
    state = ready_state(engine := FakeEngineClient())
    log = kept_steps()
    engine.last_steps = log._replace(steps=log.steps[2:])
    assert (await read_once(state))["gap"] is None
    state = ready_state(engine)
    part = await read_once(state, f"/live/events?after=1&core={core_name(state, 0)}")
    assert part["gap"] == {"reason": "steps_forgotten", "after": 1, "next": 3}


def predicted(tenant: str, ttft_s: float) -> PendingRequest:
    """A request that is submitted now."""
    return PendingRequest(1, tenant, None, submitted_s=time.monotonic(), prediction=FirstToken(0.0, ttft_s))


async def test_first_tokens_are_predicted_and_real_for_the_key_that_asked() -> None:
    for key, ids in ((None, ["mine", "other"]), ("first-key", ["mine"])):
        state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=KEYS if key else ()))
        tenants = [client.tenant for client in clients_of(state.config)] if key else ["", ""]
        mine = predicted(tenants[0], 0.25)
        state.recent_requests.note("mine", mine)
        state.recent_requests.note("other", predicted(tenants[1], 0.5))
        state.queue.first_tokens.note_first(mine, 0.3)
        part = await read_once(state, key=key)
        expected = [["mine", 250.0, 300.0], ["other", 500.0, None]]
        assert part["predictions"] == [row for row in expected if row[0] in ids]


class Reloaded(FakeEngineClient):
    """Two requests finish with the weights of before."""

    num_finishing_requests = 2
    is_exchanging = False

    async def reload(self, args: object, adapters: object, *, moves: bool) -> None:
        raise NotImplementedError


async def test_the_api_processes_of_a_server_are_one_page(tmp_path: Path) -> None:
    states = []
    for index in range(2):
        state = ready_state(Reloaded())
        state.config = replace(state.config, reload=ReloadOptions(reload_models=("next=/models/next",)))
        state.peers = Peers(tmp_path, index, 2)
        state.recent_requests.note(f"of {index}", predicted("", 0.25))
        states.append(state)
    async with states[0].peers, states[1].peers:  # type: ignore[union-attr]
        build_app(states[1])
        part = await read_once(states[0])
    assert part["predictions"] == [["of 0", 250.0, None], ["of 1", 250.0, None]]
    assert part["weights"] == {"name": "start", "num_finishing": 4}


async def test_a_request_is_explained_to_its_own_key_and_to_no_other() -> None:
    state = ready_state(engine := FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    engine.last_steps = kept_steps(state)
    app = build_app(state)
    first, second = ({"authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
    mine = await call(app, "GET", "/v1/requests/mine/explanation", headers=first)
    assert mine.json()["id"] == "mine"
    assert mine.json()["facts"]["prefill_steps"] == 1
    assert "other," not in " ".join(mine.json()["sentences"])
    foreign = await call(app, "GET", "/v1/requests/mine/explanation", headers=second)
    missing = await call(app, "GET", "/v1/requests/none/explanation", headers=second)
    assert (foreign.status, foreign.json()["error"]["code"]) == (404, "not_found")
    assert foreign.body == missing.body
    assert (await call(app, "GET", "/v1/requests/mine/explanation")).status == 401


async def test_one_of_several_answers_is_found_by_the_id_of_all() -> None:
    state = ready_state(engine := FakeEngineClient())
    log = kept_steps()
    rows = [ScheduledRequest("mine-0", 0, 4, [5]), ScheduledRequest("mine-1", 0, 4, [6])]
    engine.last_steps = log._replace(steps=[step._replace(rows=rows) for step in log.steps], events=[])
    answer = await call(build_app(state), "GET", "/v1/requests/mine/explanation")
    assert answer.json()["id"] == "mine-0"
    assert answer.json()["facts"]["parts"] == ["mine-0", "mine-1"]


async def test_one_of_several_completions_is_found_by_the_id_of_all() -> None:
    state = ready_state(engine := FakeEngineClient(), HTTPConfig(api_keys=KEYS))
    log = kept_steps(state)
    rows = [ScheduledRequest("0_mine-0", 0, 4, [5]), ScheduledRequest("1_mine-0", 0, 4, [6])]
    tenants = {"0_mine-0": log.tenants["mine"], "1_mine-0": log.tenants["mine"]}
    steps = [step._replace(rows=rows[number:]) for number, step in enumerate(log.steps)]
    engine.last_steps = log._replace(steps=steps, events=[], tenants=tenants)
    path = "/v1/requests/mine/explanation"
    answer = await call(app := build_app(state), "GET", path, headers={"authorization": "Bearer first-key"})
    assert answer.json()["id"] == "1_mine-0"
    assert answer.json()["sentences"][0].startswith("It was computed as 2 requests, ")
    assert (await call(app, "GET", path, headers={"authorization": "Bearer second-key"})).status == 404


async def test_a_slow_client_of_another_api_process_is_explained(tmp_path: Path) -> None:
    states = []
    for index in range(2):
        state = ready_state(engine := FakeEngineClient())
        engine.last_steps = kept_steps()
        state.peers = Peers(tmp_path, index, 2)
        states.append(state)
    states[1].slow_readers.note("mine", "", 2.5)
    async with states[0].peers, states[1].peers:  # type: ignore[union-attr]
        build_app(states[1])
        app = build_app(states[0])
        mine, other = [await call(app, "GET", f"/v1/requests/{name}/explanation") for name in ("mine", "other")]
    assert mine.json()["facts"]["slow_client_ms"] == 2500.0
    assert "slow_client_ms" not in other.json()["facts"]


async def test_a_request_is_found_by_its_http_id_in_any_process(tmp_path: Path) -> None:
    apps, states = [], []
    for index in range(2):
        state = ready_state(FakeEngineClient())
        state.peers = Peers(tmp_path, index, 2)
        states.append(state)
        apps.append(build_app(state))
    async with states[0].peers, states[1].peers:  # type: ignore[union-attr]
        body = {"prompt": "Hello", "max_tokens": 2}
        answer = await call(apps[1], "POST", "/v1/completions", body, {"x-request-id": "from-me"})
        rows = [ScheduledRequest(f"{answer.json()['id']}-0", 0, 4, [5])]
        log = kept_steps()
        for state, app in zip(states, apps, strict=True):
            engine: Any = state.engine
            engine.last_steps = log._replace(steps=[log.steps[0]._replace(rows=rows)], events=[])
            found = await call(app, "GET", "/v1/requests/from-me/explanation")
            assert found.json()["id"] == f"{answer.json()['id']}-0"
            assert (await call(app, "GET", "/v1/requests/from-you/explanation")).status == 404


def test_an_http_id_names_the_last_answer_of_its_key() -> None:
    recent = RecentRequests()
    for request_id, tenant in (("cmpl-1a-0", "a"), ("chatcmpl-2b", "a"), ("0_cmpl-3c-12", "b")):
        recent.note(request_id, PendingRequest(1, tenant, None, http_id="same"))
    named = [recent.named(http_id, tenant) for http_id, tenant in (("same", "a"), ("same", "b"), ("same", None))]
    assert named == ["chatcmpl-2b", "cmpl-3c", "cmpl-3c"]
    assert recent.named("same", "c") is recent.named("other", None) is None


def behind_a_long_prompt(name: str) -> StepRecording:
    """A request of 8 tokens that waited for 16 tokens of another prompt in each of 12 steps."""
    steps, now_s = [], 10.0
    for number in range(1, 17):
        rows = [ScheduledRequest("long", 16 * (number - 1), 16, [number])] if number <= 12 else []
        rows += [ScheduledRequest(name, 0, 8, [40])] if number == 13 else []
        rows += [ScheduledRequest(name, 7 + number - 13, 1, [])] if number > 13 else []
        duration_s = 0.01 + 0.001 * sum(row.num_scheduled_tokens for row in rows)
        stats = SchedulerStats(number, num_running=2, num_free_blocks=5, num_blocks=64)
        steps.append(StepRecord(now_s, StepPhases(0.0, duration_s, 0.0), stats, rows))
        now_s += duration_s
    events = [RequestEvent(one, RequestStatus.WAITING, 10.0) for one in ("long", name)]
    return StepRecording(now_s, steps, events)


async def test_an_explanation_estimates_other_settings_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ready_state(engine := FakeEngineClient(), ready=(ready := replace(READY, max_model_len=256)))
    state.config = replace(state.config, engine=replace(state.config.engine, max_num_batched_tokens=16))
    engine.engines = [ready]
    engine.last_steps = behind_a_long_prompt("r")
    app = build_app(state)
    without = (await call(app, "GET", "/v1/requests/r/explanation")).json()
    assert "replayed" not in without["facts"]
    found = (await call(app, "GET", "/v1/requests/r/explanation?estimates=true")).json()
    assert found["facts"]["queue_cause"] == "token budget"
    assert found["facts"]["replayed"]["error"] < 0.1
    assert "With --long-prefill-token-threshold 4 it would have taken about " in found["sentences"][-1]
    odd = await call(app, "GET", "/v1/requests/r/explanation?estimates=null")
    assert (odd.status, odd.json()["error"]["code"]) == (400, "invalid_value")
    assert odd.json()["error"]["param"] == "estimates"
    for limit, query in (("MAX_ESTIMATES", "?estimates=true"), ("MAX_EXPLANATIONS", "")):
        monkeypatch.setattr(explain_routes, limit, 0)
        refused = await call(app, "GET", f"/v1/requests/r/explanation{query}")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "server_is_overloaded")


async def test_explanations_take_their_turns_and_leave_their_places() -> None:
    queue, running, most = explain_routes._Queue(2), 0, 0

    async def one() -> None:
        nonlocal running, most
        async with queue.place(4):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    for _ in range(2):  # the places are free again
        results = await asyncio.gather(*[one() for _ in range(6)], return_exceptions=True)
        assert [result for result in results if result is None] == [None] * 4
        assert all(isinstance(result, HTTPError) for result in results if result is not None)
    assert most == 2
