"""Constraints for required calls, and for calls of strict functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_llm import CheckedSampling, request_errors
from llmstack_output_parsers import ToolParserFactory
from llmstack_server.chat.reading import ReasoningPlan
from llmstack_server.chat.tools import ToolMode, ToolUse
from llmstack_types import StructuredOutputsParams
from llmstack_types.vocabulary import StructuredOutputKind, words_of

# Texts before and after a call, in templates of this form.
_CALL_BEGIN, _CALL_END = "<tool_call>\n", "\n</tool_call>"
_FORMATS_OF_TEXT = ("response_format", "text.format", "output_config.format")
_NO_NAMES: Mapping[str, str] = {}
_NO_OPTIONS: Mapping[str, Any] = {}
_NO_KIND: Mapping[str, Any] = dict.fromkeys(words_of(StructuredOutputKind))
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def with_tool_constraint(
    sampling: CheckedSampling,
    tool_use: ToolUse,
    tool_parser: ToolParserFactory | None,
    options: Mapping[str, Any] = _NO_OPTIONS,
) -> CheckedSampling:
    """The sampling fields with the constraint that the tools require.

    A demanded call replaces a format of the text, since the answer has no text then. `options`: Of the constraint.

    Raises:
        InvalidRequestError: The request has a constraint on the whole output, and requires a call.
    """
    own = sampling.values.get("structured_outputs")
    if tool_use.is_forced and own is not None:
        if sampling.names.get("structured_outputs") not in _FORMATS_OF_TEXT:
            reason = "a demanded call cannot be combined with another constraint on the output"
            raise request_errors.invalid_value("tool_choice", reason)
        own = None
    constraint = None if own is not None else _constraint(tool_use, tool_parser)
    if constraint is None:
        return sampling
    return sampling.with_constraint(
        replace(constraint, **options), {constraint_name(constraint): constraint_name(constraint, tools=tool_use)}
    )


def constraint_name(
    constraint: StructuredOutputsParams | None, param_names: Mapping[str, str] = _NO_NAMES, tools: ToolUse | None = None
) -> str:
    """The name of a constraint in the request, for errors of the grammar compiler; `tools` is its source, if any."""
    if tools is not None and tools.grammar is not None:
        return f"tools[{tools.name_index}].format.definition"
    if tools is not None:
        return f"tools[{tools.name_index}].function.parameters" if tools.mode is ToolMode.NAMED else "tools"
    kind = next(
        (kind for kind in words_of(StructuredOutputKind) if getattr(constraint, kind, None) is not None), "json"
    )
    name = f"structured_outputs.{kind}"
    return param_names.get(name, name)


def _constraint(tool_use: ToolUse, tool_parser: ToolParserFactory | None) -> StructuredOutputsParams | None:
    if tool_use.grammar is not None:
        return StructuredOutputsParams(grammar=tool_use.grammar)
    if tool_use.mode is ToolMode.NAMED:
        return StructuredOutputsParams(json=tool_use.functions[tool_use.name])
    if tool_use.mode is ToolMode.REQUIRED:
        return StructuredOutputsParams(json=_array_of_calls(tool_use))
    has_strict = bool(tool_use.strict_names & tool_use.functions.keys())
    tags: tuple[str, str] | None = getattr(tool_parser, "strict_tags", None)  # a plugin's parser may have none
    if tool_use.mode is ToolMode.AUTO and has_strict and tags is not None:
        return StructuredOutputsParams(structural_tag=_tagged_calls(tool_use, tags))
    return None


def _array_of_calls(tool_use: ToolUse) -> Mapping[str, object]:
    from llmstack_structured_output import tool_calls_schema

    max_calls = None if tool_use.is_parallel else 1
    return tool_calls_schema(list(tool_use.functions.items()), max_calls=max_calls, arguments_key="parameters")


def _tagged_calls(tool_use: ToolUse, tags: tuple[str, str]) -> str:
    """Free text in which calls follow the schemas of strict functions; calls of others have any arguments."""
    from llmstack_structured_output import tagged_tool_calls

    functions = [
        (name, schema if name in tool_use.strict_names else _ANY_ARGUMENTS)
        for name, schema in tool_use.functions.items()
    ]
    return tagged_tool_calls(functions, begin=tags[0], end=tags[1], is_parallel=tool_use.is_parallel)


def after_reasoning(constraint: StructuredOutputsParams, plan: ReasoningPlan) -> StructuredOutputsParams | None:
    """The constraint applied to the text after the reasoning; None where that cannot be expressed.

    Whether to begin reasoning remains the model's choice.
    """
    body = _format_of(constraint)
    if body is None:
        return None
    begun = _with_reasoning("", body, plan)
    begins = _with_reasoning(plan.parser.start, body, plan)
    format_ = begun if plan.starts_with_reasoning else {"type": "or", "elements": [begins, body]}
    tag = json.dumps({"type": "structural_tag", "format": format_})
    return replace(constraint, **{**_NO_KIND, "structural_tag": tag})


def _with_reasoning(begin: str, body: dict[str, object], plan: ReasoningPlan) -> dict[str, object]:
    reasoning = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": plan.parser.end}
    gap = {"type": "regex", "pattern": "[ \\n]{0,2}"}
    return {"type": "sequence", "elements": [reasoning, gap, body]}


def _format_of(constraint: StructuredOutputsParams) -> dict[str, object] | None:
    """The constraint as a part of a structural tag."""
    if constraint.json is not None:
        schema = _read(constraint.json)
        return None if schema is None else {"type": "json_schema", "json_schema": schema}
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        return {"type": "choice", "choices": list(constraint.choice)}
    return _format_of_tag(constraint.structural_tag)


def _format_of_tag(tag: str | Mapping[str, object] | None) -> dict[str, object] | None:
    """The format of a tag; None for the older form, which is not nested."""
    value = _read(tag)
    format_ = value.get("format") if isinstance(value, Mapping) else None
    return format_ if isinstance(format_, dict) else None


def _read(value: str | Mapping[str, object] | None) -> object:
    """The decoded JSON; None for JSON that is invalid or over the limit, which the grammar compiler refuses."""
    from llmstack_structured_output import GrammarLimits

    if not isinstance(value, str):
        return value
    if len(value) > GrammarLimits().max_schema_bytes:
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
