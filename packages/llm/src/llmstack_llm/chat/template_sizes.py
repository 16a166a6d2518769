"""Bounds of what one operation of a chat template may make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jinja2

MAX_SIZE = 32 * 2**20
MAX_INTEGER_BITS = 4096
# An item of a list counts as much beside its text: half a million of them are counted in a moment, 16 million in 20 s.
ITEM_SIZE = 64
# Numbers that a text's width, an indentation or a number of columns may be. One in a format has at most four digits.
MAX_WIDTH = 10_000
_LONG_WIDTH = re.compile(r"%[^%a-zA-Z]*[0-9]{5}|\{[^{}]*[0-9]{5}")
_WIDTH_FROM_VALUE = re.compile(r"%[^%a-zA-Z]*\*|\{[^{}]*\{")
_SIZED = (str, bytes, list, tuple)
_OWN_ARGUMENTS = (jinja2.runtime.Context, jinja2.nodes.EvalContext, jinja2.Environment)
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "wordwrap"})
# Filters that make no text of a list.
_OF_ITEMS = frozenset(
    {"attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list",
     "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum",
     "unique"}
)  # fmt: skip
_FORMATS = frozenset({"format", "format_map"})


def check_operator(operator: str, left: object, right: object) -> None:
    """Refuses integers of too many bits, and texts and lists that would be too long.

    Raises:
        jinja2.TemplateRuntimeError: The result would be too large.
    """
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        _check(num_bits if operator in ("*", "**") else 0, MAX_INTEGER_BITS)
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
        _check(len(left) + len(right))
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, _SIZED) and isinstance(times, int):
                _check(len(items) * times)


def check_call(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuses a call of a text's own method whose result would be too long; others pass."""
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(text, str | bytes):
        if name in _WIDTH_METHODS:
            _check_widths(args, kwargs)
        elif name == "join" and args:
            _check_joined(len(text), args[0])
        elif name == "replace" and len(args) > 1:
            _check_replaced(text, args[0], args[1])
        elif name in _FORMATS:
            _check_format(str(text), (*args, *kwargs.values()))


def check_filter(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuses a filter with a large number or a long result; jinja2's own arguments may be the first of `args`."""
    values = [value for value in args if not isinstance(value, _OWN_ARGUMENTS)]
    if not values:
        return
    value, *rest = values
    if name not in _OF_ITEMS and not isinstance(value, str):
        check_text(value)
    if name in _WIDTH_FILTERS:
        _check_widths(rest, kwargs)
    if name == "join":
        separator = rest[0] if rest else kwargs.get("d", "")
        _check_joined(len(str(separator)), value)
    elif name == "replace" and len(rest) > 1:
        _check_replaced(str(value), rest[0], rest[1])
    elif name == "format":
        _check_format(str(value), (*rest, *kwargs.values()))
    elif name == "indent" and rest and isinstance(rest[0], str):
        _check(len(str(value)) + str(value).count("\n") * len(rest[0]))
    elif name == "wordwrap" and len(str(value)) > MAX_SIZE // 32:
        _check(MAX_SIZE + 1)  # it makes an object of each line


def check_text(value: object) -> None:
    """Refuses lists and objects whose text would be too long: a list may contain one list many times."""
    if isinstance(value, list | tuple | Mapping):
        _text_size(value, 0)


def _text_size(value: object, size: int) -> int:
    """`size` and about the memory of a value and its text, as soon as that is too large or known."""
    _check(size)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, list | tuple):
        return size + (len(value) if isinstance(value, str | bytes) else 1)
    for item in value:
        size = _text_size(item, size + ITEM_SIZE)
    return size


def _check(size: int, limit: int = MAX_SIZE) -> None:
    if size > limit:
        raise jinja2.TemplateRuntimeError("the result would be too large")


def _check_widths(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check(value, MAX_WIDTH)


def _check_format(text: str, values: Sequence[object]) -> None:
    """Widths are in the text, or values that it refers to; each value appears once for each place."""
    if _WIDTH_FROM_VALUE.search(text):
        _check_widths(values, {})
    if _LONG_WIDTH.search(text):
        _check(MAX_SIZE + 1)
    for value in values:
        check_text(value)
    longest = max((len(value) for value in values if isinstance(value, str | bytes)), default=0)
    _check(len(text) + (text.count("{") + text.count("%")) * longest)


def _check_joined(separator_size: int, items: object) -> None:
    if isinstance(items, list | tuple):
        check_text(items)
        _check(len(items) * separator_size)


def _check_replaced(text: str | bytes, old: object, new: object) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        _check(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]  # all are texts, or all are bytes
