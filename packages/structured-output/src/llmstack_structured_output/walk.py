"""Visits of the schemas in a JSON schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_DATA = ("const", "enum", "default", "examples")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def changed(node: Any, change: Callable[[Schema], Schema]) -> Any:
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


def target_of(root: Schema, reference: str) -> Any:
    """The target of a reference such as `#/$defs/Place`; None where it points to nothing in the schema."""
    node: Any = root if reference.startswith("#") else None
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node
