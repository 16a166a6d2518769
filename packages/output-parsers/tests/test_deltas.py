"""What a parser gives back."""

from __future__ import annotations

from llmstack_output_parsers import ParsedDelta, ToolCallDelta


def test_a_delta_without_news_is_empty():
    assert ParsedDelta() == ParsedDelta(content="", reasoning="", tool_calls=())
    assert ToolCallDelta(0) == ToolCallDelta(0, id=None, name=None, arguments="")
