"""Completions of vectors over HTTP: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmstack_llm import EngineArgs, GenerationRequest
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_types import InvalidRequestError

PATH = "/v1/completions"


class NotedPrompts(FakeEngineClient):
    """Refuses what it is asked to complete, with the prompt and its name."""

    async def submit(self, *requests: GenerationRequest) -> Any:
        prompts = ", ".join(f"{request.prompt} as {request.param}" for request in requests)
        raise InvalidRequestError(prompts, param=requests[0].param, code="invalid_value")


def app_of(engine: FakeEngineClient, *, is_enabled: bool = True) -> Any:
    state = ready_state(engine)
    state.config = dataclasses.replace(state.config, engine=EngineArgs("fake", enable_prompt_embeds=is_enabled))
    return build_app(state)


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
async def test_vectors_reach_the_engine_under_their_name(prompt: dict[str, Any]):
    answer = await call(app_of(NotedPrompts()), "POST", PATH, {"model": "fake", "prompt_embeds": "AAA", **prompt})
    assert answer.json()["error"]["message"] == "{'prompt_embeds': 'AAA'} as prompt_embeds"


async def test_several_vectors_are_prompts_of_their_own_and_come_before_texts():
    body = {"model": "fake", "prompt_embeds": ["AAA", "BBB"], "prompt": ["a", "b"]}
    answer = await call(app_of(NotedPrompts()), "POST", PATH, body)
    assert answer.json()["error"]["message"] == (
        "{'prompt_embeds': 'AAA'} as prompt_embeds[0], {'prompt_embeds': 'BBB'} as prompt_embeds[1], "
        "a as prompt[0], b as prompt[1]"
    )
    answer = await call(app_of(NotedPrompts()), "POST", PATH, {**body, "prompt_embeds": "AAA", "prompt": "a"})
    assert answer.json()["error"]["message"] == "{'prompt_embeds': 'AAA'} as prompt_embeds, a as prompt"


async def test_null_and_the_empty_array_are_no_vectors():
    app = app_of(FakeEngineClient())
    for nothing in (None, []):
        body = {"model": "fake", "prompt": "a", "prompt_embeds": nothing, "max_tokens": 1}
        assert (await call(app, "POST", PATH, body)).status == 200


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt_embeds": ["AAA", 7]}, "invalid_type", "prompt_embeds[1]"),
        ({"prompt_embeds": 7}, "invalid_type", "prompt_embeds"),
        ({"prompt": 7}, "invalid_type", "prompt"),
        ({"prompt": "a", "echo": True}, "invalid_value", "echo"),
        ({"echo": True}, "invalid_value", "echo"),
        ({"suffix": "b"}, "invalid_value", "suffix"),
        ({"thinking_token_budget": 4}, "invalid_value", "thinking_token_budget"),
    ],
)
async def test_vectors_and_what_needs_tokens_exclude_each_other(fields: dict[str, Any], code: str, param: str):
    answer = await call(app_of(NotedPrompts()), "POST", PATH, {"model": "fake", "prompt_embeds": "AAA", **fields})
    assert (answer.status, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, code, param)


async def test_vectors_are_refused_unless_they_are_asked_for():
    answer = await call(
        app_of(NotedPrompts(), is_enabled=False), "POST", PATH, {"model": "fake", "prompt_embeds": "AAA"}
    )
    assert (answer.status, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
