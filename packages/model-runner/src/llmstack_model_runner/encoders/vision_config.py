"""Typed access to the fields of a `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vision_int(config: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> int:
    """A positive integer, or a list of equal ones; the default if the field is absent or null.

    Raises:
        ValueError: It is something else.
    """
    value = defaults.get(name) if config.get(name) is None else config[name]
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: vision_config.{name} must be a positive integer, got {str(value)[:64]}.")
    return value


def vision_fields(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `vision_config` of a configuration.

    Raises:
        ValueError: There is none.
    """
    found = whole.get("vision_config")
    if not isinstance(found, Mapping):
        raise ValueError("config.json: vision_config is missing or no object.")
    return found
