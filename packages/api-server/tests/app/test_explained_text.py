"""An explanation shows text of prompts only to their own key, and only where the operator allows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from engine_core_helpers.steps import step_record, step_records
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import SubmittedRequest
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.observability import ObservabilityConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state import recent_prompts
from llmstack_server.state.recent_prompts import RecentPrompts
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import READY, FakeEngineClient, call, ready_state
from llmstack_server.web.clients import clients_of
from llmstack_types import RequestEvent, RequestStatus, SamplingParams, ScheduledRequest, StepRecording

KEYS = (Secret("first-key"), Secret("second-key"), Secret("operators-key"))
NAMES = ("earlier", "mine", "foreign")


def tenants(state: ServerState) -> list[str]:
    return [client.tenant for client in clients_of(state.config)]


def submit(prompts: Any, name: str, text: str, tenant: str = "", cache_salt: str = "") -> None:
    prompts.on_submitted(
        SubmittedRequest(name, text, list(text.encode()), SamplingParams(), tenant=tenant, cache_salt=cache_salt)
    )


def serving(*, explains_text: bool = True) -> tuple[Any, ServerState]:
    """A server whose engine core has kept a step of each request, two of them of the first key."""
    http = HTTPConfig(api_keys=KEYS, operator_keys=frozenset(KEYS[2:]))
    state = ready_state(engine := FakeEngineClient(), http)
    state.config = replace(state.config, observability=ObservabilityConfig(explains_text=explains_text))
    first, second, _ = tenants(state)
    engine.engines = [replace(READY, block_size=4)]
    rows = [ScheduledRequest(name, 8 * (name == "mine"), 12, [number]) for number, name in enumerate(NAMES)]
    steps = [step_record(1, rows, num_running=3, num_free_blocks=5, num_blocks=64)]
    events = [RequestEvent(name, RequestStatus.WAITING, 9.0) for name in NAMES]
    owners = dict(zip(NAMES, (first, first, second), strict=True))
    engine.last_steps = StepRecording(11.0, steps, events, tenants=owners)
    app = build_app(state)
    for begin in state.at_ready:
        begin()
    for name, text in zip(NAMES, ("the fox runs", "the fox sleeps", "the fox snores"), strict=True):
        for observer in engine.observers:
            submit(observer, name, text, owners[name])
    return app, state


async def explanation(app: Any, name: str, key: str) -> dict[str, Any]:
    answer = await call(app, "GET", f"/v1/requests/{name}/explanation", headers={"authorization": f"Bearer {key}"})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


async def test_own_prompts_show_the_text_where_they_part() -> None:
    app, _ = serving()
    found = await explanation(app, "mine", "first-key")
    cached = found["sentences"].index("The prefix cache held 8 of the 20 tokens of its prompt.")
    assert found["sentences"][cached + 1] == (
        "Its prompt parts from that of earlier at token 8. "
        "After 'the fox ' it has token 115, 's', and earlier has token 114, 'r'."
    )
    facts = found["facts"]
    assert (facts["parts_at"], facts["parted_from"], facts["text_before"]) == (8, "earlier", "the fox ")
    assert (facts["own_text"], facts["other_text"]) == ("s", "r")


@pytest.mark.parametrize(("taker", "shown"), [("later", "later"), ("foreign", "another key's request")])
async def test_a_block_that_another_request_got_is_named_instead(taker: str, shown: str) -> None:
    app, state = serving()
    engine: Any = state.engine
    first, second, _ = tenants(state)
    rows = [
        [ScheduledRequest("earlier", 0, 12, [7, 8, 9])],
        [ScheduledRequest(taker, 0, 5, [8, 3])],
        [ScheduledRequest("mine", 4, 10, [7, 1, 2])],
    ]
    owners = {"earlier": first, "mine": first, "later": first, "foreign": second}
    engine.last_steps = engine.last_steps._replace(steps=step_records(rows), tenants=owners)
    found = await explanation(app, "mine", "first-key")
    cached = found["sentences"].index("The prefix cache held 4 of the 14 tokens of its prompt.")
    assert found["sentences"][cached + 1] == (
        f"Its first 8 tokens are also those of earlier: the next block of these was evicted 1.0 s before it began, "
        f"for {shown}."
    )
    assert (found["facts"]["evicted_for"], found["facts"]["shared_with"]) == (shown, "earlier")


@pytest.mark.parametrize(("num_cached", "block_size"), [(12, 4), (0, 16)])
async def test_what_the_cache_can_hold_needs_no_cause(num_cached: int, block_size: int) -> None:
    app, state = serving()
    engine: Any = state.engine
    engine.engines = [replace(READY, block_size=block_size)]
    rows = [
        [ScheduledRequest("earlier", 0, 12, [7, 8, 9])],
        [ScheduledRequest("mine", num_cached, 14 - num_cached, [])],
    ]
    engine.last_steps = engine.last_steps._replace(steps=step_records(rows))
    found = await explanation(app, "mine", "first-key")
    assert not {"parts_at", "shared_with"} & set(found["facts"])


async def test_no_text_of_another_key_is_shown_not_even_to_operators() -> None:
    app, _ = serving()
    for name, key in (("mine", "operators-key"), ("foreign", "operators-key"), ("foreign", "second-key")):
        found = await explanation(app, name, key)
        assert "fox" not in str(found)
        assert "parts_at" not in found["facts"]


async def test_without_the_flag_no_prompt_is_kept() -> None:
    app, state = serving(explains_text=False)
    assert not state.engine.observers  # type: ignore[attr-defined]
    assert "parts_at" not in (await explanation(app, "mine", "first-key"))["facts"]


async def test_prompts_under_another_salt_are_not_compared() -> None:
    prompts = RecentPrompts()
    submit(prompts, "salted", "the fox", cache_salt="s")
    submit(prompts, "r", "the fox sleeps")
    assert await prompts.parting("r", "") is None
    submit(prompts, "whole", "the fox sleeps")
    found = await prompts.parting("whole", "")
    assert found is not None
    assert (found["at"], found["other"], found["own_token"]) == (14, "r", None)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_prompts_part_at_the_first_token_that_differs(one: str, other: str) -> None:
    prompts = RecentPrompts()
    submit(prompts, "before", other)
    submit(prompts, "r", one)
    found = asyncio.run(prompts.parting("r", ""))
    num_common = max(length for length in range(min(len(one), len(other)) + 1) if one[:length] == other[:length])
    assert (None if found is None else found["at"]) == (num_common or None)


async def test_the_prompts_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS", 3)
    monkeypatch.setattr(recent_prompts, "MAX_TOKENS", 20)
    monkeypatch.setattr(recent_prompts, "MAX_PROMPT_TOKENS", 12)
    prompts = RecentPrompts()
    for number in range(4):
        submit(prompts, f"r{number}", "same")
    assert await prompts.parting("r0", "") is None
    found = await prompts.parting("r3", "")
    assert found is not None
    submit(prompts, "long", "same but longer")
    kept = dict(prompts._prompts.items())
    assert len(kept["long"].token_ids) == 12
    assert sum(len(one.token_ids) for one in kept.values()) <= 20


async def test_the_prompts_of_one_key_do_not_end_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS", 6)
    prompts = RecentPrompts()
    submit(prompts, "earlier", "the fox runs", tenant="quiet")
    submit(prompts, "mine", "the fox sleeps", tenant="quiet")
    for number in range(20):
        submit(prompts, f"r{number}", "much of another", tenant="loud")
    found = await prompts.parting("mine", "quiet")
    assert found is not None
    assert (found["at"], found["other"]) == (8, "earlier")
