"""Answers with many numbers: other requests run while they are made."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.outputs import request_state
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_server.app import build_app
from llmstack_server.testing import READY, call, ready_state

NUM_TOKENS = 512
MAX_CHARS = 1 << 17
"""What may be encoded in one turn of the event loop, a tenth of the shortest answer here."""
MAX_ENTRIES = 128
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Any]:
    write_model_folder(tmp_path, config={"n_positions": 2 * NUM_TOKENS})
    facts = replace(READY, vocab_size=257, max_model_len=2 * NUM_TOKENS, num_kv_tokens=1 << 16)
    llm = AsyncLLM(load_model_config(str(tmp_path)), FakeEngineCoreClient(facts), load_tokenizer(tmp_path))
    await llm.wait_until_ready()
    yield build_app(ready_state(llm))
    await llm.shutdown()


class PerTurn:
    """What was done in each turn of the event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.chars: Counter[int] = Counter()
        self.entries: Counter[int] = Counter()

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.fixture
def per_turn(monkeypatch: pytest.MonkeyPatch) -> PerTurn:
    """Notes the characters that are encoded as JSON, and the log-probabilities that are made for prompts."""
    noted, encode, make = PerTurn(), json.JSONEncoder.iterencode, request_state.logprobs_dict

    def iterencode(self: json.JSONEncoder, value: Any, _one_shot: bool = False) -> Iterator[str]:
        pieces = list(encode(self, value, _one_shot))
        noted.chars[noted.turn] += sum(map(len, pieces))
        return iter(pieces)

    def logprobs_dict(*arguments: Any, **options: Any) -> Any:
        noted.entries[noted.turn] += 1
        return make(*arguments, **options)

    monkeypatch.setattr(json.JSONEncoder, "iterencode", iterencode)
    monkeypatch.setattr(request_state, "logprobs_dict", logprobs_dict)
    return noted


async def answer(app: Any, per_turn: PerTurn, path: str, body: dict[str, Any]) -> Any:
    counting = asyncio.create_task(per_turn.count())
    found = await call(app, "POST", path, body)
    counting.cancel()
    assert found.status == 200, found.body[:200]
    return found


@pytest.mark.parametrize(
    ("path", "body", "places_of"),
    [
        (
            "/v1/chat/completions",
            {"messages": USER, "max_tokens": NUM_TOKENS, "logprobs": True, "top_logprobs": 20},
            lambda body: body["choices"][0]["logprobs"]["content"],
        ),
        (
            "/v1/responses",
            {"input": "Hello", "max_output_tokens": NUM_TOKENS, "top_logprobs": 20},
            lambda body: body["output"][0]["content"][0]["logprobs"],
        ),
        (
            "/api/chat",
            {"model": "fake", "messages": USER, "options": {"num_predict": NUM_TOKENS}, "logprobs": True,
             "top_logprobs": 20, "stream": False},
            lambda body: body["logprobs"],
        ),
    ],
    ids=["chat", "response", "Ollama"],
)  # fmt: skip
async def test_log_probabilities_of_an_answer_are_encoded_in_pieces(
    app: Any, per_turn: PerTurn, path: str, body: dict[str, Any], places_of: Callable[[Any], list[Any]]
) -> None:
    found = await answer(app, per_turn, path, body)
    assert len(places_of(found.json())) == NUM_TOKENS
    assert len(found.body) > 3 * MAX_CHARS
    assert max(per_turn.chars.values()) <= MAX_CHARS


async def test_the_last_events_of_a_response_are_encoded_in_pieces(app: Any, per_turn: PerTurn) -> None:
    body = {"input": "Hello", "max_output_tokens": NUM_TOKENS, "top_logprobs": 20, "stream": True}
    found = await answer(app, per_turn, "/v1/responses", body)
    last = found.body.decode().strip().rpartition("\n\n")[2]
    event = json.loads(last.partition("data: ")[2])
    assert last.startswith("event: response.incomplete\n")
    assert len(event["response"]["output"][0]["content"][0]["logprobs"]) == NUM_TOKENS
    assert max(per_turn.chars.values()) <= MAX_CHARS


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}], ids=["echo", "prompt"])
async def test_log_probabilities_of_a_prompt_are_made_in_pieces(
    app: Any, per_turn: PerTurn, fields: dict[str, Any]
) -> None:
    body = {"prompt": "x" * NUM_TOKENS, "max_tokens": 1, **fields}
    choice = (await answer(app, per_turn, "/v1/completions", body)).json()["choices"][0]
    places = choice["prompt_logprobs"] or choice["logprobs"]["top_logprobs"][:NUM_TOKENS]
    assert [place is None for place in places] == [True] + [False] * (NUM_TOKENS - 1)
    assert sum(per_turn.entries.values()) >= NUM_TOKENS - 1
    assert max(per_turn.entries.values()) <= MAX_ENTRIES
    assert max(per_turn.chars.values()) <= MAX_CHARS


@pytest.mark.parametrize(
    ("path", "body", "vectors_of"),
    [
        ("/v1/embeddings", {"input": ["a"] * 256}, lambda body: [one["embedding"] for one in body["data"]]),
        ("/api/embed", {"model": "fake", "input": ["a"] * 256}, lambda body: body["embeddings"]),
        ("/pooling", {"input": "a" * 256, "task": "token_embed"}, lambda body: body["data"][0]["data"]),
    ],
    ids=["texts", "Ollama", "tokens"],
)
async def test_vectors_are_encoded_one_at_a_time(
    app: Any, per_turn: PerTurn, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any],
    vectors_of: Callable[[Any], list[Any]],
) -> None:  # fmt: skip
    """The engine core answers all texts in one step."""
    found = (await answer(app, per_turn, path, body)).json()
    vectors = vectors_of(found)
    assert len(vectors) == 256
    assert all(len(vector) == 4 for vector in vectors)
    turns_with_vectors = [
        turn for turn, num_chars in per_turn.chars.items() if num_chars >= len("[1.0,97.0,97.0,97.0]")
    ]
    assert len(turns_with_vectors) >= 256
