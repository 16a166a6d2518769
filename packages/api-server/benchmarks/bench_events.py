"""What one streamed token costs the API process: building and framing its chunk, and what a body and a scrape cost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_server.apis.openai.chunks import ChunkEncoder
from llmstack_server.apis.openai.protocol import CompletionRequest
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.web.fields import parse
from llmstack_server.web.json_body import decode_object

ENCODER = ChunkEncoder("cmpl-" + "0" * 32, "text_completion", 1_700_000_000, "model", has_usage=False)


def test_a_chunk_of_text(benchmark: BenchmarkFixture):
    assert b'"text":" token"' in ENCODER.encode_text(0, " token")
    benchmark(lambda: ENCODER.encode_text(0, " token"))


def test_a_chunk_of_a_message(benchmark: BenchmarkFixture):
    assert b'"content":" token"' in ENCODER.encode_content(0, " token")
    benchmark(lambda: ENCODER.encode_content(0, " token"))


def test_a_chunk_with_other_fields(benchmark: BenchmarkFixture):
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "token_ids": [7]}
    benchmark(lambda: ENCODER.encode([choice]))


@pytest.mark.parametrize("num_chars", [500, 1_000_000])
def test_a_body_is_read(benchmark: BenchmarkFixture, num_chars: int):
    body: dict[str, Any] = {"model": "m", "prompt": "word " * (num_chars // 5), "max_tokens": 5, "temperature": 0.5}
    encoded = json.dumps(body).encode()
    benchmark(lambda: parse(CompletionRequest, decode_object(encoded)))


def test_metrics_are_rendered(benchmark: BenchmarkFixture):
    metrics = ready_state(FakeEngineClient()).metrics
    benchmark(metrics.render)
