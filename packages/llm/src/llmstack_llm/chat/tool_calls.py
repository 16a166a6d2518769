"""Tool calls in messages, with their arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmstack_llm import request_errors

MAX_TOOL_CALLS = 128
MAX_DEPTH = 64
INVALID_JSON = "INVALID_JSON"
"""Key of arguments that are not the JSON text of an object, such as those cut by `max_tokens`."""


def normal_tool_calls(param: str, calls: object) -> list[dict[str, object]]:
    """Copies with the arguments of each function parsed; a text that is no object is kept under `INVALID_JSON`.

    Raises:
        InvalidRequestError: Names the call and the field.
    """
    if not isinstance(calls, list | tuple):
        raise request_errors.invalid_type(param, "an array of tool calls", calls)
    if len(calls) > MAX_TOOL_CALLS:
        raise request_errors.array_too_long(param, MAX_TOOL_CALLS, len(calls))
    return [_normal_call(f"{param}[{index}]", call) for index, call in enumerate(calls)]


def _normal_call(param: str, call: object) -> dict[str, object]:
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


def _arguments(param: str, arguments: object) -> dict[str, object]:
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise request_errors.invalid_type(param, "a string", arguments)
    return argument_object(arguments)


def argument_object(text: str) -> dict[str, object]:
    """The object that a model has written as arguments; text that is none under `INVALID_JSON`.

    Clients send such text back with each later turn, so it is no error.
    """
    if not text:
        return {}
    parsed = _parsed(text)
    return parsed if isinstance(parsed, dict) and not _is_deep(parsed) else {INVALID_JSON: text}


def _parsed(text: str) -> object:
    """The value of a JSON text; None for what is no JSON, or spells half a surrogate pair."""
    try:
        parsed = json.loads(text)
        if "\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
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
