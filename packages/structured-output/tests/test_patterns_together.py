"""Schemas under which one string has to match many patterns are counted, wherever the patterns stand."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_structured_output import GrammarCompiler
from llmstack_structured_output.patterns_together import has_more_patterns
from llmstack_types import InvalidRequestError, StructuredOutputsParams

NUM_PATTERNS = 100
PATTERNS = [{"pattern": f"a{number}"} for number in range(NUM_PATTERNS)]
DEFINED = {"$defs": {f"p{number}": pattern for number, pattern in enumerate(PATTERNS)}}
REFERENCES = [{"$ref": f"#/$defs/p{number}"} for number in range(NUM_PATTERNS)]
CHAIN = {f"p{number}": {"pattern": "a", "$ref": f"#/$defs/p{number + 1}"} for number in range(NUM_PATTERNS)}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"allOf": REFERENCES, **DEFINED},
        {"$ref": "#/$defs/p0", "$defs": CHAIN | {f"p{NUM_PATTERNS}": {}}},
        {"allOf": [{"anyOf": [pattern, {"type": "null"}]} for pattern in PATTERNS]},
        {"anyOf": [{"type": "null"}, {"oneOf": [{"allOf": REFERENCES}]}], **DEFINED},
        {"allOf": [{"properties": {"a": {"items": pattern}}} for pattern in PATTERNS]},
        {"anyOf": [{"properties": {"a": {"pattern": "b"}}}], "properties": {"a": {"allOf": PATTERNS[:99]}}},
        {"properties": {"a": {"$ref": "#/definitions/all"}}, "definitions": {"all": {"allOf": PATTERNS}}},
    ],
)
def test_patterns_that_have_to_match_together_are_found_and_refused(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    assert has_more_patterns(schema, NUM_PATTERNS - 1)
    assert not has_more_patterns(schema, NUM_PATTERNS)
    with pytest.raises(InvalidRequestError, match="more than 16 patterns have to match together") as caught:
        compiler.compile(StructuredOutputsParams(json={"type": "object", "properties": {}, "required": [], **schema}))
    assert caught.value.code == "schema_too_complex"


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": PATTERNS},
        {"properties": {f"a{number}": pattern for number, pattern in enumerate(PATTERNS)}},
        {"items": {"anyOf": REFERENCES}, **DEFINED},
        {"anyOf": [{"properties": {"a": pattern}} for pattern in PATTERNS]},
        {"$ref": "#/$defs/p", "$defs": {"p": {"pattern": "a", "anyOf": [{"$ref": "#/$defs/p"}]}}},
        {"allOf": [{"const": {"pattern": "a"}}] * NUM_PATTERNS},
    ],
)
def test_patterns_of_other_strings_are_not_counted_together(schema: dict[str, Any]) -> None:
    assert not has_more_patterns(schema, 2)


def test_the_search_is_bounded() -> None:
    schema: dict[str, Any] = {"pattern": "a"}
    for _ in range(20):  # a million strings to look at
        schema = {"allOf": [{"anyOf": [schema, dict(schema)]}, {"anyOf": [{"type": "null"}, dict(schema)]}]}
    assert has_more_patterns(schema, 1 << 30) is False
