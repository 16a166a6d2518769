"""The constraint on an answer that must be a call, or whose calls must keep to their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_llm import request_errors
from llmstack_output_parsers import HermesToolParser, ToolParserFactory
from llmstack_server.chat.reading import ReasoningPlan
from llmstack_server.chat.tools import ToolMode, ToolUse
from llmstack_types import SamplingParams, StructuredOutputsParams

# What stands around a call, as templates of this form show it.
_CALL_BEGIN, _CALL_END = "<tool_call>\n", "\n</tool_call>"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NO_NAMES: Mapping[str, str] = {}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def with_tool_constraint(
    params: SamplingParams, tool_use: ToolUse, tool_parser: ToolParserFactory | None
) -> SamplingParams:
    """The parameters with the constraint that the tools ask for.

    Raises:
        InvalidRequestError: The request brings a constraint of its own beside a call that it demands.
    """
    if tool_use.is_forced and params.structured_outputs is not None:
        reason = "a demanded call cannot be combined with another constraint on the output"
        raise request_errors.invalid_value("tool_choice", reason)
    if params.structured_outputs is not None:
        return params
    constraint = _constraint(tool_use, tool_parser)
    return params if constraint is None else replace(params, structured_outputs=constraint)


def constraint_name(
    constraint: StructuredOutputsParams | None, param_names: Mapping[str, str] = _NO_NAMES, tools: ToolUse | None = None
) -> str:
    """What the user calls a constraint, for the errors of what compiles it; `tools` is what it was made of, if so."""
    if tools is not None:
        return f"tools[{tools.name_index}].function.parameters" if tools.mode is ToolMode.NAMED else "tools"
    kind = next((kind for kind in _KINDS if getattr(constraint, kind, None) is not None), "json")
    name = f"structured_outputs.{kind}"
    return param_names.get(name, name)


def _constraint(tool_use: ToolUse, tool_parser: ToolParserFactory | None) -> StructuredOutputsParams | None:
    if tool_use.mode is ToolMode.NAMED:
        return StructuredOutputsParams(json=tool_use.functions[tool_use.name])
    if tool_use.mode is ToolMode.REQUIRED:
        return StructuredOutputsParams(json=_array_of_calls(tool_use))
    has_strict = bool(tool_use.strict_names & tool_use.functions.keys())
    if tool_use.mode is ToolMode.AUTO and has_strict and tool_parser is HermesToolParser:
        return StructuredOutputsParams(structural_tag=_tagged_calls(tool_use))
    return None


def _array_of_calls(tool_use: ToolUse) -> Mapping[str, Any]:
    from llmstack_structured_output import tool_calls_schema

    max_calls = None if tool_use.is_parallel else 1
    return tool_calls_schema(list(tool_use.functions.items()), max_calls=max_calls, arguments_key="parameters")


def _tagged_calls(tool_use: ToolUse) -> str:
    """Free text in which calls keep to the schemas of strict functions; those of others have any arguments."""
    from llmstack_structured_output import tagged_tool_calls

    functions = [
        (name, schema if name in tool_use.strict_names else _ANY_ARGUMENTS)
        for name, schema in tool_use.functions.items()
    ]
    return tagged_tool_calls(functions, begin=_CALL_BEGIN, end=_CALL_END, is_parallel=tool_use.is_parallel)


def after_reasoning(constraint: StructuredOutputsParams, plan: ReasoningPlan) -> StructuredOutputsParams | None:
    """The same constraint on what follows the reasoning; None where it cannot be written.

    Reasoning that has not begun yet stays the model's choice.
    """
    body = _format_of(constraint)
    if body is None:
        return None
    begun = _with_reasoning("", body, plan)
    begins = _with_reasoning(plan.parser.start, body, plan)
    format_ = begun if plan.begins_open else {"type": "or", "elements": [begins, body]}
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


def _with_reasoning(begin: str, body: dict[str, Any], plan: ReasoningPlan) -> dict[str, Any]:
    reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": plan.parser.end}
    gap = {"type": "regex", "pattern": "[ \\n]{0,2}"}
    return {"type": "sequence", "elements": [reasoning, gap, body]}


def _format_of(constraint: StructuredOutputsParams) -> dict[str, Any] | None:
    """The constraint as a part of a structural tag."""
    if constraint.whitespace_pattern is not None or constraint.disable_any_whitespace:
        return None
    if constraint.json is not None:
        schema = _read(constraint.json)
        return None if schema is None else {"type": "json_schema", "json_schema": schema}
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constraint.choice]}
    return _format_of_tag(constraint.structural_tag)


def _format_of_tag(tag: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """None for tags in the older form, which is not nested."""
    value = _read(tag)
    format_ = value.get("format") if isinstance(value, Mapping) else None
    return format_ if isinstance(format_, dict) else None


def _read(value: str | Mapping[str, Any] | None) -> Any:
    """What a text says in JSON; None where it is none, which whoever compiles the constraint refuses."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
