"""Streaming parsers of model output: tool calls and reasoning, in linear time."""

from llmstack_output_parsers.forced import NamedCallParser, RequiredCallsParser
from llmstack_output_parsers.json_formats import HermesToolParser, Llama3JsonToolParser, MistralToolParser
from llmstack_output_parsers.parser import Parser, ToolParser, ToolSchemas
from llmstack_output_parsers.plugins import UnknownParserError
from llmstack_output_parsers.protocols import OutputParser, ParsedDelta, ToolCallDelta
from llmstack_output_parsers.pythonic import PythonicToolParser
from llmstack_output_parsers.reasoning import ChainedParser, DeepSeekR1Parser, MistralReasoningParser, ThinkParser
from llmstack_output_parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningParserFactory,
    ToolParserFactory,
    check_parser,
    reasoning_parser,
    tool_parser,
)
from llmstack_output_parsers.tagged_calls import TaggedToolParser
from llmstack_output_parsers.tagged_formats import Qwen3CoderToolParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ChainedParser",
    "DeepSeekR1Parser",
    "HermesToolParser",
    "Llama3JsonToolParser",
    "MistralReasoningParser",
    "MistralToolParser",
    "NamedCallParser",
    "OutputParser",
    "ParsedDelta",
    "Parser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "ReasoningParserFactory",
    "RequiredCallsParser",
    "TaggedToolParser",
    "ThinkParser",
    "ToolCallDelta",
    "ToolParser",
    "ToolParserFactory",
    "ToolSchemas",
    "UnknownParserError",
    "check_parser",
    "reasoning_parser",
    "tool_parser",
]
