"""Structured output: checks and compiles constraints on a model's text, and says token by token what may follow."""

from llmstack_structured_output.compiler import Grammar, GrammarCompiler
from llmstack_structured_output.constrained_requests import ConstrainedRequests
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.matcher import Matcher
from llmstack_structured_output.tool_calls import tagged_tool_calls, tool_calls_schema

__all__ = [
    "ConstrainedRequests",
    "Grammar",
    "GrammarCompiler",
    "GrammarLimits",
    "Matcher",
    "tagged_tool_calls",
    "tool_calls_schema",
]
