"""Configuration dataclasses as nested dicts of builtins.

Every field is checked on the way back.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(config: Any) -> dict[str, Any]:
    """Nested dicts of the builtins in a dataclass of configuration; tuples become lists."""
    return {field.name: _value_to_plain(getattr(config, field.name)) for field in fields(config)}


def _value_to_plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Mapping):
        return {name: _value_to_plain(one) for name, one in value.items()}
    return [_value_to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(cls: type[T], data: object, where: str = "") -> T:
    """The inverse of `to_plain` for the dataclass `cls`.

    Raises:
        ValueError: An unknown or a missing field, or one of the wrong type; the text names it.
    """
    if not isinstance(data, dict) or not is_dataclass(cls):
        raise ValueError(f"{where or cls.__name__} must be a mapping")
    hints = get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    for name in data:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {str(name)[:64]!r}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{cls.__name__} needs the field {name!r}")
    return cls(**{name: _value_from_plain(hints[name], value, f"{where}{name}") for name, value in data.items()})


def _value_from_plain(hint: Any, value: object, where: str) -> Any:
    nested = next(filter(is_dataclass, _alternatives(hint)), None)
    if nested is not None and (value is not None or hint is nested):
        return from_plain(nested, value, f"{where}.")
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        return tuple(_value_from_plain(get_args(hint)[0], item, where) for item in value)
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a mapping")
        of_key, of_value = get_args(hint)
        return {
            _value_from_plain(of_key, name, f"a name in {where}"): _value_from_plain(of_value, one, where)
            for name, one in value.items()
        }
    words = next((one for one in _alternatives(hint) if get_origin(one) is Literal), None)
    if words is not None and (value is not None or hint is words):
        if value not in get_args(words):
            raise ValueError(f"{where} must be one of {', '.join(get_args(words))}")
        return value
    # A float field takes a whole number; a bool is no number.
    accepted = {int, float} if float in _alternatives(hint) else set()
    if type(value) not in accepted | _alternatives(hint):
        raise ValueError(f"{where} must be {_names(hint)}, but is {type(value).__name__}")
    return value


def _alternatives(hint: Any) -> set[type]:
    return set(get_args(hint)) if get_origin(hint) in (types.UnionType, Union) else {hint}


def _names(hint: Any) -> str:
    return " or ".join(sorted("null" if one is types.NoneType else one.__name__ for one in _alternatives(hint)))
