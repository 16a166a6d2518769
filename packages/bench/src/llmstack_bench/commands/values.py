"""Argument types: parsers of single command-line values."""

from __future__ import annotations

import argparse
import json
from typing import Any

from llmstack_bench.commands.foreign_flags import refused_value
from llmstack_bench.pictures import picture_size


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(text, 1)


def natural_int(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(text, 0)


def positive_float(text: str) -> float:
    """A number above 0, infinity included."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value


def key_value(text: str) -> tuple[str, str]:
    """Parses `KEY=VALUE` into its two parts."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    return key, value


def range_ratio(text: str) -> float | tuple[float, float]:
    """A fraction for all lengths, or JSON with one for `input` and one for `output`."""
    if not text.lstrip().startswith("{"):
        return float(text)
    value = json_object(text)
    if value.keys() != {"input", "output"} or not all(isinstance(one, (int, float)) for one in value.values()):
        raise argparse.ArgumentTypeError(f"'{text}' needs numbers for input and output, and nothing else")
    return float(value["input"]), float(value["output"])


def image_size(text: str) -> tuple[int, int]:
    """Width and height of a picture."""
    try:
        return picture_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no size such as 2048x1536: {error}") from error


def dataset_name(text: str) -> str:
    """The name of a data set here, from it or from vLLM's name."""
    name = text.replace("_", "-")
    reason = refused_value("--dataset-name", name)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"'{text}': {reason}")
    names = {"prefix-repetition": "shared-prefix", "generated-shared-prefix": "shared-prefix", "jsonl": "custom"}
    return names.get(name, name)


def backend(text: str) -> str:
    """The name of a backend to measure; backends without a load generator here are refused."""
    reason = refused_value("--backend", text)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"'{text}': {reason}")
    return text


def _at_least(text: str, minimum: int) -> int:
    number = int(text)
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{number} is below the minimum of {minimum}")
    return number
