"""Integers of a JSON schema, kept from being rounded to doubles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MAX_EXACT = 1 << 53
_MAX = (1 << 63) - 1
# The least double of 64 bits but one. With -2^63 the library ends its process.
_MIN = 1024 - (1 << 63)
# A bound, the inclusive one of the same side, the next integer inwards, and the direction in which it may be rounded.
_BOUNDS = {
    "minimum": ("minimum", 0, math.inf), "exclusiveMinimum": ("minimum", 1, math.inf),
    "maximum": ("maximum", 0, -math.inf), "exclusiveMaximum": ("maximum", -1, -math.inf),
}  # fmt: skip


class NotExactError(ValueError):
    """The library cannot write this integer; the text says which."""


def with_exact_numbers(node: dict[str, Any]) -> dict[str, Any]:
    """A schema under which no rounded integer is written.

    The library counts in doubles of 64 bits. A bound beyond 2^53 is moved inwards to the next one: what is written
    satisfies the schema, and up to 1,023 integers beside the bound are never written. A constant has no neighbour that
    would do, so it is refused; so are bounds without a double between them, and those that all 64 bits are outside of.

    Raises:
        NotExactError: A constant is no double, or bounds have none within.
    """
    values = [node[key] for key in ("const", "enum") if key in node]
    for number in _integers(values):
        if not _is_exact(number):
            raise NotExactError(f"the integer {str(number)[:40]} is beyond 2^53 and would be rounded")
    large = [key for key in _BOUNDS if _is_large(node.get(key))]
    if not large:
        return node
    result = {key: value for key, value in node.items() if key not in large}
    for key in large:
        name, step, direction = _BOUNDS[key]
        bound = _inwards(node[key] + step, direction)
        other = result.get(name, bound)
        result[name] = max(bound, other) if direction > 0 else min(bound, other)
    least, most = (_integer_bound(node, name) for name in ("minimum", "maximum"))
    if least <= most and result.get("minimum", least) > result.get("maximum", most):
        raise NotExactError(f"every integer from {least} to {most} is beyond 2^53 and would be rounded")
    return result


def _integer_bound(node: dict[str, Any], name: str) -> float:
    """The bound on one side that integers have under a schema; infinite where it has none."""
    direction = _BOUNDS[name][2]
    bounds = [
        node[key] + step for key, (side, step, _) in _BOUNDS.items() if side == name and _is_number(node.get(key))
    ]
    return -direction if not bounds else max(bounds) if direction > 0 else min(bounds)


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _is_exact(number: int) -> bool:
    return abs(number) <= MAX_EXACT or number == _MAX or (_MIN <= number < _MAX and int(float(number)) == number)


def _is_large(value: Any) -> bool:
    return type(value) is int and abs(value) >= MAX_EXACT


def _inwards(number: int, direction: float) -> int:
    """The number itself or the next one in a direction that the library takes as it is."""
    number = max(number, _MIN) if direction > 0 else min(number, _MAX)
    if not _MIN <= number <= _MAX:
        raise NotExactError(f"the bound {str(number)[:40]} is beyond 64 bits")
    if _is_exact(number):
        return number
    nearest = float(number)
    if (int(nearest) < number and direction > 0) or (int(nearest) > number and direction < 0):
        nearest = math.nextafter(nearest, direction)
    return min(_MAX, int(nearest))


def _integers(value: Any) -> Iterator[int]:
    """The integers in a value, without recursion."""
    stack = [value]
    while stack:
        one = stack.pop()
        if type(one) is int:
            yield one
        elif isinstance(one, dict | list):
            stack += one.values() if isinstance(one, dict) else one
