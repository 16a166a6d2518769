"""Estimate of what compiling a constraint costs, from its size and shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmstack_structured_output.compiler import kind_of
from llmstack_types import StructuredOutputsParams

_PER_BYTE_S = 1e-7
_PER_NODE_S = 1e-4
_PER_REPEAT_S = 1e-6
_PER_OPERATOR_S = 0.05
# Branches that must all match are intersected, and the automata of their patterns multiply.
_PER_PAIR_S = 1e-5


def expected_seconds(params: StructuredOutputsParams) -> float:
    """Rough processor time of compiling a constraint in normal form, for an order; never an admission by itself."""
    kind = kind_of(params)
    value: Any = getattr(params, kind)
    if kind in ("json", "structural_tag"):
        return len(value) * _PER_BYTE_S + _schema_seconds(value)
    if kind == "choice":
        return sum(map(len, value)) * _PER_BYTE_S + len(value) * _PER_NODE_S / 10
    if kind == "json_object":
        return _PER_NODE_S
    operators = value.count("&") + value.count("~") if kind == "grammar" else 0
    return len(value) * _PER_BYTE_S + _repeats(value) * _PER_REPEAT_S + operators * _PER_OPERATOR_S


def _schema_seconds(text: str) -> float:
    try:
        nodes = list(_nodes(json.loads(text)))
    except (ValueError, RecursionError):
        return 0.0  # refused as soon as it is read
    return sum(_PER_NODE_S + _node_seconds(node) for node in nodes)


def _node_seconds(node: Mapping[str, Any]) -> float:
    branches = node.get("allOf")
    seconds = _pattern_repeats(node) * _PER_REPEAT_S
    if isinstance(branches, list) and len(branches) > 1:
        repeats = sum(_pattern_repeats(inner) for branch in branches for inner in _nodes(branch))
        seconds += len(branches) * (len(branches) + repeats) * _PER_PAIR_S
    return seconds


def _pattern_repeats(node: Mapping[str, Any]) -> int:
    pattern = node.get("pattern")
    return _repeats(pattern) if isinstance(pattern, str) else 0


def _repeats(pattern: str) -> int:
    """The sum of the numbers that follow opening braces; each counts at most 1,000, the limit of a repetition."""
    return sum(min(1_000, _leading_number(part)) for part in pattern.split("{")[1:])


def _leading_number(text: str) -> int:
    digits = text[:4]
    while digits and not digits.isdecimal():
        digits = digits[:-1]
    return int(digits or 0)


def _nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a JSON value, without recursion."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node
