"""Structured output: constraints on a model's text, compiled to token masks."""

from llmstack_structured_output.checking.checker import ConstraintChecker
from llmstack_structured_output.compiler import Grammar, GrammarCompiler, normal_form
from llmstack_structured_output.constrained_requests import ConstrainedRequests, ConstraintFailedError
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.matcher import Matcher
from llmstack_structured_output.tool_calls import tagged_tool_calls, tool_calls_schema

__all__ = [
    "ConstrainedRequests",
    "ConstraintChecker",
    "ConstraintFailedError",
    "Grammar",
    "GrammarCompiler",
    "GrammarLimits",
    "Matcher",
    "normal_form",
    "tagged_tool_calls",
    "tool_calls_schema",
]
