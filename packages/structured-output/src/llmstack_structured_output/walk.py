"""Visits of the schemas in a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DATA = ("const", "enum", "default", "examples")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def changed(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with each schema in it changed, the inner ones first; values in it that are no schemas are kept."""
    if isinstance(node, list):
        return [changed(entry, change) for entry in node]
    if not isinstance(node, dict):
        return node
    parts = {}
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            parts[key] = {name: changed(entry, change) for name, entry in value.items()}
        else:
            parts[key] = value if key in _DATA else changed(value, change)
    return change(parts)
