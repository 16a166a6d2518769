"""`suffix`: text after the gap that a fill-in-the-middle model fills."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_helpers.gaps import front_end

from llmstack_llm import AsyncLLM
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state

FORMS = [
    (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
    (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>yz<fim_middle>"),
    (["[SUFFIX]", "[PREFIX]"], "[SUFFIX]yz[PREFIX]ab"),
    (["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"], "\u2581<PRE>ab\u2581<SUF>yz\u2581<MID>"),
]  # fmt: skip
BODY = {"prompt": "ab", "suffix": "yz", "max_tokens": 2}


@pytest.mark.parametrize(("tokens", "whole"), FORMS, ids=str)
async def test_a_gap_is_put_in_the_form_of_the_model(tmp_path: Path, tokens: list[str], whole: str) -> None:
    async with front_end(tmp_path / "m", tokens) as (llm, client):
        await fill_gaps(llm, client, whole)


async def fill_gaps(llm: AsyncLLM, client: FakeEngineCoreClient, whole: str) -> None:
    app = build_app(ready_state(llm, ready=client.ready))
    tokenizer = await llm.get_tokenizer()
    for prompt in ("ab", ["ab", "ab"], tokenizer.encode("ab")):
        answer = await call(app, "POST", "/v1/completions", {**BODY, "prompt": prompt})
        assert answer.status == 200, answer.body
        assert tokenizer.decode(client.added[-1].prompt_token_ids) == whole
    refused = await call(app, "POST", "/v1/completions", {**BODY, "echo": True})
    assert refused.json()["error"]["param"] == "suffix"


async def test_other_models_refuse_a_suffix() -> None:
    error = (await call(build_app(ready_state(FakeEngineClient())), "POST", "/v1/completions", BODY)).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    answer = await call(build_app(ready_state(FakeEngineClient())), "POST", "/v1/completions", {**BODY, "suffix": ""})
    assert answer.status == 200


async def test_a_suffix_is_not_copied_for_more_prompts_than_memory_has_room_for(tmp_path: Path) -> None:
    async with front_end(tmp_path / "m", FORMS[0][0]) as (llm, client):
        app = build_app(ready_state(llm, ready=client.ready))
        body = {**BODY, "prompt": ["ab"] * 1024, "suffix": "y" * (1 << 15)}
        error = (await call(app, "POST", "/v1/completions", body)).json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "request_budget_exceeded")
        assert client.added == []
