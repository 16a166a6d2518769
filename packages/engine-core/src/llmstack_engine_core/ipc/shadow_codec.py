"""Encoding of `ShadowReport`, in outputs and from the process of the shadow."""

from __future__ import annotations

from typing import Any, Final

from llmstack_engine_core.ipc import fields
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_types import ShadowFigures, ShadowReport

MAX_TEXT_CHARS: Final = 512
_TEXT: Final = fields.text(MAX_TEXT_CHARS)
_NUM_PLAIN: Final = 5
_MAX_NUMBER: Final = 1e18


def encode_shadow(report: ShadowReport) -> list[Any]:
    """The values, in the order of their class."""
    name, problem, *numbers = report
    plain, sums = numbers[:_NUM_PLAIN], numbers[_NUM_PLAIN:]
    return [name[:MAX_TEXT_CHARS], problem[:MAX_TEXT_CHARS], *plain, *map(_list, sums)]


def _list(figures: Any) -> list[Any]:
    return list(figures)


def decode_shadow(value: Any) -> ShadowReport:
    """The inverse of `encode_shadow`."""
    name, problem, *numbers = fields.row(value, "shadow", len(ShadowReport._fields))
    plain, sums = numbers[:_NUM_PLAIN], numbers[_NUM_PLAIN:]
    _check_numbers(plain)
    return ShadowReport(_TEXT(name, "name"), _TEXT(problem, "problem"), *plain, *map(_figures, sums))


def _figures(value: Any) -> ShadowFigures:
    numbers = fields.row(value, "figures", len(ShadowFigures._fields))
    _check_numbers(numbers)
    return ShadowFigures(*numbers)


def _check_numbers(values: list[Any]) -> None:
    if not all(type(value) in (int, float) and 0 <= value < _MAX_NUMBER for value in values):
        raise CodecError("shadow must hold numbers of at least 0")
