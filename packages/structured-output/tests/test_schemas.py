"""Whatever is written under a schema is valid under it, and what is valid can be written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_types import InvalidRequestError, StructuredOutputsParams

Writer = Callable[[Matcher, random.Random], str | None]

# Keyword by keyword, as JSON Schema's own test suite: texts that are valid under a schema, and texts that are not; and
# schemas of which each is refused by name, since to ignore it would let invalid texts through.
SUITE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "schema_cases.json").read_text())
CASES, NOT_SUPPORTED = SUITE["cases"], SUITE["not_supported"]


def check_valid(schema: Any, text: str) -> None:
    value = json.loads(text)
    jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


def by_letter(schema: Any) -> StructuredOutputsParams:
    """By the letter of JSON Schema: objects may have properties that they do not declare."""
    return StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=False)


def write_some(
    compiler: GrammarCompiler, writer: Writer, params: StructuredOutputsParams, schema: Any, num_texts: int
) -> int:
    """How many of them came to an end; all of those are valid under the schema."""
    grammar = compiler.compile(params)
    texts = [writer(grammar.new_matcher(), random.Random(seed)) for seed in range(num_texts)]
    finished = [text for text in texts if text is not None]
    for text in finished:
        check_valid(schema, text)
    return len(finished)


@pytest.mark.parametrize("name", CASES)
def test_what_is_valid_can_be_written_and_what_is_not_cannot(compiler: GrammarCompiler, name: str) -> None:
    case = CASES[name]
    grammar = compiler.compile(by_letter(case["schema"]))

    def can_be_written(text: str) -> bool:
        matcher = grammar.new_matcher()
        return matcher.accept(text.encode()) and matcher.is_complete

    assert [text for text in case["valid"] if not can_be_written(text)] == []
    assert [text for text in case["invalid"] if can_be_written(text)] == []


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_written_is_valid(compiler: GrammarCompiler, writer: Writer, name: str) -> None:
    schema = CASES[name]["schema"]
    assert write_some(compiler, writer, by_letter(schema), schema, 10) > 0


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_what_is_not_supported_is_refused(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(json=NOT_SUPPORTED[name]))
    assert caught.value.code == "invalid_json_schema"


NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"', "ü", "items", "$id2"])
SCALARS = st.sampled_from([None, True, 0, -3, 2.5, "", "red", 'a "b"', "ü\n"])
SMALL = st.integers(0, 3)


def strings() -> st.SearchStrategy[dict[str, Any]]:
    lengths = st.tuples(SMALL, SMALL).map(lambda two: {"minLength": min(two), "maxLength": max(two)})
    patterns = st.sampled_from(
        [{"pattern": "^[ab]{1,3}$"}, {"pattern": "x"}, {"format": "date"}, {"format": "uuid"}, {}]
    )
    return st.one_of(lengths, patterns).map(lambda rest: {"type": "string", **rest})


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
        lambda two: {"minimum": two[0], "maximum": two[0] + two[1]}
    )
    return st.tuples(st.sampled_from(["integer", "number"]), st.one_of(bounds, st.just({}))).map(
        lambda two: {"type": two[0], **two[1]}
    )


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(items, SMALL, SMALL).map(
        lambda three: {"type": "array", "items": three[0], "minItems": min(three[1:]), "maxItems": max(three[1:])}
    )


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, values, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | draw(
        st.sampled_from([{"additionalProperties": False}, {}, {"additionalProperties": {"type": "null"}}])
    )


LEAVES = st.one_of(
    strings(),
    numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    st.lists(SCALARS, min_size=1, max_size=4, unique_by=repr).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    ),
    max_leaves=8,
)


def check_generated(compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any]) -> None:
    try:
        write_some(compiler, writer, by_letter(schema), schema, 3)
    except InvalidRequestError as error:
        refusal = error.message
    else:
        return
    assert "nsatisfiable" in refusal, "only what nothing is valid under may be refused"


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schema=SCHEMAS)
def test_whatever_is_written_under_a_generated_schema_is_valid(
    compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any]
) -> None:
    check_generated(compiler, writer, schema)


@pytest.mark.full
@settings(max_examples=5000, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schema=SCHEMAS)
def test_whatever_is_written_under_thousands_of_schemas_is_valid(
    compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any]
) -> None:
    check_generated(compiler, writer, schema)
