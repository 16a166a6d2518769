"""Types of option values: read from text, and checked."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MAX_SHOWN = 64


class ValueType(NamedTuple):
    """The values that an annotation allows.

    Attributes:
        base: `bool`, `int`, `float`, `str`, `dict` (a JSON object), or `object` (anything).
        choices: The values of a `Literal`.
        is_list: Several values of `base`.
        is_optional: None is a value as well.
        has_suffixes: Integers may end with a unit: `4k` is 4000, `4K` is 4096.
    """

    base: type
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_optional: bool = False
    has_suffixes: bool = False

    def read(self, text: str) -> Any:
        """The value that a text stands for; a list may be one value or a JSON array.

        Raises:
            ValueError: The text is no such value; the sentence says why.
        """
        if not self.is_list:
            return self._read_one(text)
        if not text.startswith("["):
            return (self._read_one(text),)
        entries = _parse_json(text)
        is_right = isinstance(entries, list) and (
            self.base is not str or all(isinstance(entry, str) for entry in entries)
        )
        if not is_right:
            raise ValueError(f"{shown(text)} is not a JSON array{' of strings' if self.base is str else ''}")
        return tuple(self._read_one(as_text(entry)) for entry in entries)

    def check(self, value: object) -> Any:
        """The value of a Python keyword, with lists as tuples and JSON objects parsed.

        Raises:
            ValueError: It has another type, or is none of the choices.
        """
        if value is None and self.is_optional:
            return None
        if not self.is_list:
            return self._check_one(value)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{shown(value)} is not a list")
        return tuple(self._check_one(entry) for entry in value)

    def _read_one(self, text: str) -> Any:
        if self.base is bool:
            return _read_bool(text)
        if self.base is int:
            return _read_int(text, self.has_suffixes)
        if self.base is float:
            return _read_float(text)
        if self.base is dict:
            return self._check_one(_parse_json(text))
        return self._check_one(text)

    def _check_one(self, value: object) -> Any:
        if self.base is dict and isinstance(value, str):
            value = _parse_json(value)
        if self.base is float and type(value) is int:
            value = float(value)
        if not _is_instance(value, self.base):
            raise ValueError(f"{shown(value)} is not {_ARTICLES[self.base]}")
        if self.choices and value not in self.choices:
            raise ValueError(wrong_choice(value, self.choices))
        return value


_ARTICLES: Mapping[type, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", dict: "a JSON object",
}  # fmt: skip


def value_type(annotation: object, *, has_suffixes: bool = False) -> ValueType:
    """The type that a resolved annotation describes.

    Raises:
        TypeError: Options cannot have this type.
    """
    members = _members(annotation)
    is_optional = type(None) in members
    found = [member for member in members if member is not type(None)]
    if len(found) > 1:  # what a mapping may be written as besides: its JSON
        found = [member for member in found if member is not str]
    if len(found) != 1:
        raise TypeError(f"options cannot be of type {annotation}")
    [kind] = found
    if get_origin(kind) is Literal:
        return ValueType(str, get_args(kind), is_optional=is_optional)
    if get_origin(kind) in (tuple, Sequence) or getattr(get_origin(kind), "__name__", "") == "Sequence":
        item = _members(get_args(kind)[0])
        base = value_type(item[0]) if len(item) == 1 else ValueType(object)
        return ValueType(base.base, base.choices, True, is_optional, has_suffixes)
    if getattr(get_origin(kind), "__name__", "") == "Mapping":
        return ValueType(dict, is_optional=is_optional)
    return ValueType(kind, is_optional=is_optional, has_suffixes=has_suffixes)


def as_text(value: object) -> str:
    """A value of YAML or JSON as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def wrong_choice(value: object, choices: Sequence[str]) -> str:
    """The sentence about a value that is none of `choices`; names the nearest one."""
    import difflib  # late: only a mistyped word needs it

    nearest = difflib.get_close_matches(str(value)[:_MAX_SHOWN], choices, n=1)
    advice = f"did you mean {nearest[0]!r}?" if nearest else f"choose from {', '.join(choices)}"
    return f"invalid value {shown(value)}; {advice}"


def _members(annotation: object) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_instance(value: object, base: type) -> bool:
    if base is dict:
        return isinstance(value, Mapping)
    if base in (int, float):
        return type(value) is base  # True is no number
    return isinstance(value, base)


def _read_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"{shown(text)} is not true or false")
    return word in _TRUE


def _read_int(text: str, has_suffixes: bool) -> int:
    scale = _SUFFIXES.get(text[-1:], 1) if has_suffixes else 1
    digits = text[:-1] if scale > 1 else text
    try:
        return int(float(digits) * scale) if "." in digits and scale > 1 else int(digits) * scale
    except (ValueError, OverflowError):
        examples = " such as 4096, 4k or 4K" if has_suffixes else ""
        raise ValueError(f"{shown(text)} is not an integer{examples}") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(text)} is not valid JSON: {error}") from None
