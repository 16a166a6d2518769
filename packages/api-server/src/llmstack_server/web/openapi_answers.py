"""Schemas of the types of answers, for the OpenAPI document."""

from __future__ import annotations

import types
from typing import Any, Final, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from llmstack_server.web.openapi import Schema

_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema_of(kind: Any, components: dict[str, Schema]) -> Schema:
    """The schema of a type; those of objects go to the components."""
    if kind in (Any, object):
        return {}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if is_typeddict(kind):
        name = kind.__name__
        if name not in components:
            components[name] = {}  # a type may hold itself
            components[name] = _object_schema(kind, components)
        return {"$ref": f"#/components/schemas/{name}"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], components)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], components) or True}
    if origin is Literal:
        return {"type": "string", "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(one, components) for one in arguments]}
    raise TypeError(f"no schema for {kind}")


def _object_schema(kind: object, components: dict[str, Schema]) -> Schema:
    # With annotations as text, `__required_keys__` has all keys.
    hints = get_type_hints(kind, include_extras=True)
    required = sorted(name for name, hint in hints.items() if get_origin(hint) is not NotRequired)
    text = " ".join((kind.__doc__ or "").split())
    return {
        "type": "object",
        "description": text,
        "required": required,
        "properties": {
            name: schema_of(hint if name in required else get_args(hint)[0], components) for name, hint in hints.items()
        },
    }
