"""Integers beyond 2^53 are written as they are, or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_structured_output.numbers import MAX_EXACT
from llmstack_types import InvalidRequestError, StructuredOutputsParams

Writer = Callable[[Matcher, random.Random], str | None]
LARGE = st.integers(MAX_EXACT - 4, (1 << 64) + 4) | st.sampled_from([1 << 60, 10**18, (1 << 63) - 1, 1 << 63])
INTEGERS = LARGE | LARGE.map(int.__neg__) | st.integers(-5, 5)


def write(compiler: GrammarCompiler, writer: Writer, schema: Any) -> Any:
    """A value under the schema; None where it is refused."""
    try:
        grammar = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except InvalidRequestError as error:
        if error.code != "invalid_json_schema":
            raise
        return None
    text = writer(grammar.new_matcher(), random.Random(0))
    return None if text is None else json.loads(text)


@settings(max_examples=150, deadline=None)
@given(number=INTEGERS)
def test_a_constant_is_written_exactly_or_refused(compiler: GrammarCompiler, writer: Writer, number: int) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        assert write(compiler, writer, schema) in (number, None)
    assert write(compiler, writer, {"const": {"a": [number]}}) in ({"a": [number]}, None)


@pytest.mark.parametrize("number", [MAX_EXACT, MAX_EXACT + 2, -MAX_EXACT, 1 << 60, 10**18, (1 << 63) - 1])
def test_what_the_library_can_write_is_not_refused(compiler: GrammarCompiler, writer: Writer, number: int) -> None:
    assert write(compiler, writer, {"const": number}) == number
    assert write(compiler, writer, {"type": "integer", "minimum": number, "maximum": number}) == number


@settings(max_examples=150, deadline=None)
@given(
    one=INTEGERS,
    two=INTEGERS,
    lower=st.sampled_from(["minimum", "exclusiveMinimum"]),
    upper=st.sampled_from(["maximum", "exclusiveMaximum"]),
)
def test_bounds_hold_exactly(
    compiler: GrammarCompiler, writer: Writer, one: int, two: int, lower: str, upper: str
) -> None:
    least, most = min(one, two), max(one, two)
    value = write(compiler, writer, {"type": "integer", lower: least, upper: most})
    if value is not None:
        assert least + (lower != "minimum") <= value <= most - (upper != "maximum")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"minimum": MAX_EXACT + 1, "maximum": MAX_EXACT + 3}, MAX_EXACT + 2),
        ({"exclusiveMinimum": MAX_EXACT, "exclusiveMaximum": MAX_EXACT + 3}, MAX_EXACT + 2),
        ({"minimum": -MAX_EXACT - 3, "maximum": -MAX_EXACT - 1}, -MAX_EXACT - 2),
        ({"minimum": (1 << 63) - 1, "maximum": 1 << 70}, (1 << 63) - 1),
        ({"minimum": (1 << 60) - 100, "maximum": (1 << 60) + 100}, 1 << 60),
    ],
)
def test_bounds_are_moved_inwards_to_what_can_be_written(
    compiler: GrammarCompiler, writer: Writer, schema: dict[str, int], written: int
) -> None:
    assert write(compiler, writer, {"type": "integer", **schema}) == written


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"minimum": MAX_EXACT + 1, "maximum": MAX_EXACT + 1},
            "every integer from 9007199254740993 to 9007199254740993",
        ),
        ({"exclusiveMinimum": MAX_EXACT, "exclusiveMaximum": MAX_EXACT + 2}, "every integer from 9007199254740993 to"),
        ({"minimum": (1 << 60) + 1, "maximum": (1 << 60) + 5}, "beyond 2\\^53 and would be rounded"),
        ({"minimum": MAX_EXACT + 5, "maximum": MAX_EXACT + 3}, "is greater than maximum"),
        ({"minimum": 5, "maximum": 4}, "minimum .5. is greater than maximum .4."),
        ({"minimum": 1 << 63}, "the bound 9223372036854775808 is beyond 64 bits"),
        ({"maximum": -(1 << 63) - 1}, "the bound -9223372036854775809 is beyond 64 bits"),
    ],
)
def test_bounds_without_an_integer_between_them_are_refused_by_their_reason(
    compiler: GrammarCompiler, schema: dict[str, int], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiler.compile(StructuredOutputsParams(json={"type": "integer", **schema}))
    assert caught.value.code == "invalid_json_schema"


def test_the_bounds_of_64_bits_are_bounds(compiler: GrammarCompiler, writer: Writer) -> None:
    assert write(compiler, writer, {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}) is not None
    assert write(compiler, writer, {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}) is not None


def test_a_refusal_names_the_integer(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="the integer 9007199254740993 is beyond 2\\^53"):
        compiler.compile(StructuredOutputsParams(json={"properties": {"id": {"const": 9007199254740993}}}))
