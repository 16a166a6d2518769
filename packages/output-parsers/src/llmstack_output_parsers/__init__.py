"""Streaming parsers of model output: tool calls and reasoning out of text, in linear time; standard library only."""

from llmstack_output_parsers.deltas import ParsedDelta, ToolCallDelta
from llmstack_output_parsers.protocols import OutputParser

__all__ = ["OutputParser", "ParsedDelta", "ToolCallDelta"]
