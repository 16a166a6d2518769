"""Typed reads from a model's config.json; every error is a ValueError that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer; the default where the field is absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name} must be a positive integer, got {str(value)[:64]}.")
    return value


def read_float(config: Mapping[str, Any], name: str, default: float) -> float:
    """A number."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be a number, got {str(value)[:64]}.")
    return float(value)


def read_bool(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A truth value."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, got {str(value)[:64]}.")
    return value


def read_num_labels(config: Mapping[str, Any]) -> int:
    """How many labels a classifier has: those that are named, else two, which transformers leaves out."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return read_int(config, "num_labels", 2)


def read_head_dim(hidden_size: int, num_heads: int) -> int:
    """What a head has of the hidden size."""
    if hidden_size % num_heads:
        raise ValueError(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} attention heads.")
    return hidden_size // num_heads


def refuse(config: Mapping[str, Any], name: str, *allowed: object) -> None:
    """Raise unless the field is absent or has one of the allowed values."""
    value = config.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"config.json: {name} {str(value)[:64]} is not supported.")
