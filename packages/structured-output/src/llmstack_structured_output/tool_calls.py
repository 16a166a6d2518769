"""Constraints for tool calls: as the whole answer, or between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Function = tuple[str, Mapping[str, Any]]
"""The name of a function, and the schema of its arguments."""


def call_schema(function: Function, *, name_key: str = "name", arguments_key: str = "arguments") -> dict[str, Any]:
    """The schema of one call: an object with the function's name and its arguments.

    References inside the arguments' schema, such as `#/$defs/Place`, point to its new place.
    """
    name, arguments = function
    return {
        "type": "object",
        "properties": {name_key: {"const": name}, arguments_key: _moved(arguments, f"#/properties/{arguments_key}")},
        "required": [name_key, arguments_key],
        "additionalProperties": False,
    }


def tool_calls_schema(
    functions: Sequence[Function],
    *,
    max_calls: int | None = None,
    name_key: str = "name",
    arguments_key: str = "arguments",
) -> dict[str, Any]:
    """The schema of an array of one call or several; for `StructuredOutputsParams(json=...)`.

    Args:
        functions: The functions that may be called, at least one.
        max_calls: 1 allows no parallel calls; None is no limit.
        name_key: The model's key of the function's name.
        arguments_key: The model's key of the arguments.
    """
    calls = []
    for index, (name, arguments) in enumerate(functions):
        place = f"#/items/anyOf/{index}/properties/{arguments_key}"
        call = call_schema((name, {}), name_key=name_key, arguments_key=arguments_key)
        call["properties"][arguments_key] = _moved(arguments, place)
        calls.append(call)
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if max_calls is None else schema | {"maxItems": max_calls}


def tagged_tool_calls(
    functions: Sequence[Function],
    *,
    begin: str,
    end: str,
    is_required: bool = False,
    is_parallel: bool = True,
    name_key: str = "name",
    arguments_key: str = "arguments",
) -> str:
    """A structural tag for calls amid text, such as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    For `StructuredOutputsParams(structural_tag=...)`.

    Args:
        functions: The functions that may be called, at least one.
        begin: The text before the object of a call, such as `<tool_call>`; it turns the constraint on.
        end: The text after it.
        is_required: The answer has at least one call and nothing else.
        is_parallel: There may be more than one.
        name_key: The model's key of the function's name.
        arguments_key: The model's key of the arguments.
    """
    calls = [call_schema(function, name_key=name_key, arguments_key=arguments_key) for function in functions]
    tags = [{"begin": begin, "content": {"type": "json_schema", "json_schema": call}, "end": end} for call in calls]
    if is_required:
        body = {"type": "tags_with_separator", "separator": "", "at_least_one": True, "tags": tags}
    else:
        body = {"type": "triggered_tags", "triggers": [begin], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": body | {"stop_after_first": not is_parallel}})


def _moved(schema: Any, place: str) -> Any:
    """The schema with its local references made relative to its new place; recursion is as deep as the schema."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, place) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
        return moved
    return [_moved(entry, place) for entry in schema] if isinstance(schema, list) else schema
