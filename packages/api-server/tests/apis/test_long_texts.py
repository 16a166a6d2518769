"""Texts too long for the model, refused on every route before they are tokenized."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import Tokenizer, load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import READY, call, ready_state

LONG = "x" * (1 << 20)
MESSAGES = [{"role": "user", "content": LONG}]
CUT = {"truncate_prompt_tokens": 8}
OPENAI_ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": LONG, **CUT}, "prompt"),
    ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
    ("/v1/chat/completions", {"messages": MESSAGES, **CUT}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": LONG, "truncation": "auto"}, "input"),
    ("/v1/responses/input_tokens", {"input": LONG}, "input"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": MESSAGES}, "messages"),
    ("/v1/embeddings", {"input": ["x", LONG]}, "input[1]"),
    ("/v1/embeddings", {"input": LONG, **CUT}, "input"),
    ("/v1/embeddings", {"messages": MESSAGES}, "messages"),
    ("/v1/embeddings", {"messages": MESSAGES, **CUT}, "messages"),
    ("/pooling", {"input": LONG}, "input"),
    ("/v1/rerank", {"query": "x", "documents": ["x", LONG]}, "documents[1]"),
    ("/v1/rerank", {"query": "x", "documents": ["x", LONG], **CUT}, "documents[1]"),
    ("/v1/score", {"text_1": "x", "text_2": LONG}, "text_2[0]"),
    ("/v1/score", {"text_1": "x", "text_2": LONG, **CUT}, "text_2[0]"),
]


async def make(folder: Path, **facts: Any) -> AsyncLLM:
    write_model_folder(folder)
    client = FakeEngineCoreClient(replace(READY, **facts))
    made = AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder))
    await made.wait_until_ready()
    return made


@pytest.fixture
async def llm(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    made = await make(tmp_path / "model", vocab_size=257)
    yield made
    await made.shutdown()


@pytest.fixture
async def classifier(tmp_path: Path) -> AsyncIterator[AsyncLLM]:
    made = await make(tmp_path / "classifier", vocab_size=257, num_labels=1, is_generative=False)
    yield made
    await made.shutdown()


@pytest.fixture
def refuses_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every way to tokenize a long text fail."""
    for name in ("encode", "encode_plain", "encode_uncontrolled", "encode_texts"):
        tokenize = getattr(Tokenizer, name)

        def fail(self: Tokenizer, text: Any, *, real: Any = tokenize, **options: Any) -> Any:
            if sum(map(len, [text] if isinstance(text, str) else text)) > 10_000:
                raise AssertionError("a long text was tokenized")
            return real(self, text, **options)

        monkeypatch.setattr(Tokenizer, name, fail)


@pytest.mark.usefixtures("refuses_long_texts")
@pytest.mark.parametrize(("path", "body", "param"), OPENAI_ROUTES)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    llm: AsyncLLM, path: str, body: dict[str, Any], param: str
):
    answer = await call(build_app(ready_state(llm)), "POST", path, body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


@pytest.mark.usefixtures("refuses_long_texts")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/classify", {"input": LONG}, "input"),
        ("/classify", {"input": LONG, **CUT}, "input"),
        ("/v1/rerank", {"query": LONG, "documents": ["x"]}, "documents[0]"),
        ("/v1/score", {"text_1": LONG, "text_2": "x", **CUT}, "text_2[0]"),
    ],
)
async def test_a_classifier_refuses_a_text_that_cannot_fit_before_it_is_tokenized(
    classifier: AsyncLLM, path: str, body: dict[str, Any], param: str
):
    answer = await call(build_app(ready_state(classifier)), "POST", path, body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


@pytest.mark.usefixtures("refuses_long_texts")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_message_that_cannot_fit_is_refused_before_it_is_tokenized(llm: AsyncLLM, path: str):
    body = {"messages": MESSAGES, "model": "fake"} | ({"max_tokens": 4} if path == "/v1/messages" else {})
    answer = await call(build_app(ready_state(llm)), "POST", path, body)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "too long to be tokenized" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("/v1/embeddings", {"input": "x" * 100_000}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    ],
)
async def test_a_text_over_the_context_may_still_be_cut(llm: AsyncLLM, path: str, body: dict[str, Any]):
    answer = await call(build_app(ready_state(llm)), "POST", path, {**body, **CUT})
    assert (answer.status, answer.json()["usage"]["prompt_tokens"]) == (200, 8)
