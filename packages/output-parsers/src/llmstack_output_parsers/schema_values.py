"""Conversion of bare text to JSON values, by the schema of a parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_JSON_TYPES = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_ALTERNATIVES = 32


def json_text(value: object) -> str:
    """JSON without escapes for characters outside ASCII."""
    return json.dumps(value, ensure_ascii=False)


def property_schema(parameters: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The schema of one parameter; empty where there is none."""
    properties = (parameters or {}).get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that the schema names, in its alternatives too; empty if it names none."""
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named) if isinstance(named, list | tuple) else set()
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in list(alternatives)[:_MAX_ALTERNATIVES] if isinstance(alternatives, list | tuple) else ():
            if isinstance(alternative, Mapping) and isinstance(alternative.get("type"), str):
                found.add(alternative["type"])
    return frozenset(entry for entry in found if isinstance(entry, str))


def is_string(schema: Mapping[str, Any]) -> bool:
    """Whether the value is a string; it is if the schema names no type."""
    return types_of(schema) <= {"string"}


def converted(text: str, schema: Mapping[str, Any]) -> str:
    """The JSON text of the value, if the text is JSON of a type in the schema; else a string."""
    bare = text.strip()
    literal = _LITERALS.get(bare.lower(), bare)
    try:
        value = json.loads(literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json_text(text)
    is_meant = value is None or any(_is_a(value, name) for name in types_of(schema))
    return literal if is_meant else json_text(text)


def _is_a(value: object, type_name: str) -> bool:
    if isinstance(value, bool):  # a number to Python
        return type_name == "boolean"
    return isinstance(value, _JSON_TYPES.get(type_name, ()))


def _refuse(constant: str) -> None:
    raise ValueError(constant)
