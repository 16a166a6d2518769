"""Patterns of `patternProperties` that match only named properties."""

from __future__ import annotations

import functools
import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_ZERO = {"const": 0}
_OPTIONS = {"whitespace_flexible": False}


def without_used_up_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """The schema with what such a pattern says in the places of the properties.

    The library lets a comma follow all properties of an object while there is a pattern, and then finds no name.
    """
    patterns = node.get("patternProperties")
    if not isinstance(patterns, dict) or node.get("additionalProperties") is not False:
        return node
    properties, required = node.get("properties", {}), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return node
    names = list(dict.fromkeys(name for name in (*properties, *required) if isinstance(name, str)))
    used_up = [pattern for pattern in patterns if names and _is_used_up(pattern, names)]
    described = dict(properties)
    for pattern in used_up:
        for name in names:
            if _matches(pattern, name):
                own = [described[name]] if name in described else []
                described[name] = {"allOf": [*own, patterns[pattern]]}
    if not used_up:
        return node
    left = {pattern: value for pattern, value in patterns.items() if pattern not in used_up}
    return node | {"properties": described, "patternProperties": left}


def _is_used_up(pattern: str, names: list[str]) -> bool:
    """Whether nothing but these names matches."""
    schema = {
        "type": "object", "properties": dict.fromkeys(names, _ZERO), "required": names,
        "patternProperties": {pattern: _ZERO}, "additionalProperties": False,
    }  # fmt: skip
    matcher = _matcher(schema)
    members = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    text = f"{{{members}".encode()
    if matcher.try_consume_tokens(list(text)) != len(text):
        return False
    matcher.compute_bitmask()
    return bool(matcher.is_error())


def _matches(pattern: str, name: str) -> bool:
    text = json.dumps(name, ensure_ascii=False).encode()
    matcher = _matcher({"type": "string", "pattern": pattern})
    return bool(matcher.try_consume_tokens(list(text)) == len(text))


def _matcher(schema: dict[str, Any]) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema | {"x-guidance": _OPTIONS}))
    return LLMatcher(_bytes(), grammar, log_level=0)


@functools.cache
def _bytes() -> LLTokenizer:
    """Of one token for each byte."""
    return LLTokenizer("byte")
