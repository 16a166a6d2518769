"""What one streamed token costs the API process: building and framing its chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_llm.outputs.request_output import CompletionOutput, RequestOutput
from llmstack_server.apis.openai.chat import ChatAnswer
from llmstack_server.apis.openai.chunks import ChunkEncoder
from llmstack_server.apis.openai.completions import CompletionAnswer
from llmstack_server.apis.openai.generation import Generation
from llmstack_server.apis.openai.protocol import ChatCompletionRequest, CompletionRequest
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.web.fields import parse
from llmstack_server.web.json_body import decode_object

NEW = CompletionOutput(index=0, text=" token", token_ids=[7])
OUTPUT = RequestOutput("id", None, [1, 2, 3], outputs=[NEW])
ENCODER = ChunkEncoder("cmpl-" + "0" * 32, "text_completion", 1_700_000_000, "model", has_usage=False)


def test_a_completion_chunk(benchmark: BenchmarkFixture):
    fields = CompletionRequest()
    answer = CompletionAnswer(Generation(ready_state(FakeEngineClient()), fields, "model", [], "id"), fields, [])
    builder = answer._builder(0)
    benchmark(lambda: ENCODER.encode([builder.build(0, OUTPUT, NEW)]))


def test_a_chat_chunk(benchmark: BenchmarkFixture):
    fields = ChatCompletionRequest()
    answer = ChatAnswer(Generation(ready_state(FakeEngineClient()), fields, "model", [], "id"), fields)
    benchmark(lambda: ENCODER.encode([answer._chunk_choice(NEW)]))


@pytest.mark.parametrize("num_chars", [500, 1_000_000])
def test_a_body_is_read(benchmark: BenchmarkFixture, num_chars: int):
    body: dict[str, Any] = {"model": "m", "prompt": "word " * (num_chars // 5), "max_tokens": 5, "temperature": 0.5}
    encoded = json.dumps(body).encode()
    benchmark(lambda: parse(CompletionRequest, decode_object(encoded)))


def test_metrics_are_rendered(benchmark: BenchmarkFixture):
    metrics = ready_state(FakeEngineClient()).metrics
    benchmark(metrics.render)
