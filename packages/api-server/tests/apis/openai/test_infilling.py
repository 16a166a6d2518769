"""`suffix`: text after the gap that a fill-in-the-middle model fills."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, byte_tokenizer, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_types import EngineReady

FORMS = [
    (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
    (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>yz<fim_middle>"),
    (["[SUFFIX]", "[PREFIX]"], "[SUFFIX]yz[PREFIX]ab"),
    (["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"], "\u2581<PRE>ab\u2581<SUF>yz\u2581<MID>"),
]  # fmt: skip
BODY = {"prompt": "ab", "suffix": "yz", "max_tokens": 2}


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Any]:
    """Makes a front end whose tokenizer has further special tokens, and the client of its engine core."""
    started: list[AsyncLLM] = []

    async def make(tokens: list[str]) -> tuple[AsyncLLM, FakeEngineCoreClient]:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(tokens)
        folder = write_model_folder(tmp_path / "m", tokenizer=tokenizer, config={"vocab_size": 300})
        client = FakeEngineCoreClient(EngineReady(64, 16, 128, 300, "float32", "cpu"))
        llm = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
        await llm.wait_until_ready()
        started.append(llm)
        return llm, client

    yield make
    for llm in started:
        await llm.shutdown()


@pytest.mark.parametrize(("tokens", "whole"), FORMS, ids=str)
async def test_a_gap_is_put_in_the_form_of_the_model(engines: Any, tokens: list[str], whole: str) -> None:
    llm, client = await engines(tokens)
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
