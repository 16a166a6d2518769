"""Tool calls in messages, with their arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_types import InvalidRequestError

MAX_TOOL_CALLS = 128
MAX_DEPTH = 64


def normal_tool_calls(param: str, calls: object) -> list[dict[str, Any]]:
    """Copies with the arguments of each function parsed.

    Raises:
        InvalidRequestError: Names the call and the field.
    """
    if not isinstance(calls, list | tuple):
        raise request_errors.invalid_type(param, "an array of tool calls", calls)
    if len(calls) > MAX_TOOL_CALLS:
        raise request_errors.array_too_long(param, MAX_TOOL_CALLS, len(calls))
    return [_normal_call(f"{param}[{index}]", call) for index, call in enumerate(calls)]


def _normal_call(param: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise request_errors.invalid_type(param, "an object", call)
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise request_errors.invalid_type(f"{param}.function", "an object", function)
    name = function.get("name")
    if not isinstance(name, str):
        raise request_errors.invalid_type(f"{param}.function.name", "a string", name)
    arguments = _arguments(f"{param}.function.arguments", function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(param: str, arguments: object) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise request_errors.invalid_type(param, "a string", arguments)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        raise _no_object(param) from None
    if not isinstance(parsed, dict):
        raise _no_object(param)
    if _is_deep(parsed):
        raise request_errors.invalid_value(param, f"it is nested deeper than {MAX_DEPTH} levels")
    return parsed


def _is_deep(value: object) -> bool:
    """True beyond `MAX_DEPTH`: what handles the arguments later calls itself once per level."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        entries = [entry.values() if isinstance(entry, dict) else entry for entry in level]
        level = [child for entry in entries for child in entry if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _no_object(param: str) -> InvalidRequestError:
    return request_errors.invalid_value(param, "expected the JSON text of an object")
