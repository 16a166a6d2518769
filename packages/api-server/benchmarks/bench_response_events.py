"""What one streamed token costs in the two APIs with named events: building and framing."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_server.apis.anthropic.content import ContentBuilder
from llmstack_server.apis.responses.output_items import OutputBuilder
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.web.sse import frame_named

NEW = ChatDelta(0, " token", token_ids=(7,))


def test_an_event_of_a_response(benchmark: BenchmarkFixture):
    output = OutputBuilder()

    def add() -> list[bytes]:
        return [frame_named({"type": kind, "sequence_number": 7, **fields}) for kind, fields in output.add(NEW)]

    assert len(add()) == 3
    benchmark(add)


def test_an_event_of_a_message(benchmark: BenchmarkFixture):
    content = ContentBuilder()

    def add() -> list[bytes]:
        return [frame_named(event) for event in content.add(NEW)]

    assert len(add()) == 2
    benchmark(add)
