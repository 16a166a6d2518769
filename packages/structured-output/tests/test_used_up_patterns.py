"""An object whose patterns match only its named properties can always be ended."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_types import InvalidRequestError, StructuredOutputsParams

CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
SMALL = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMAS: dict[str, dict[str, Any]] = {
    "required": {**CLOSED, "required": ["x1"], "patternProperties": {"^x1$": SMALL}},
    "described": {
        **CLOSED, "properties": {"x1": {"minimum": 5}}, "required": ["x1"], "patternProperties": {"^x1$": SMALL}
    },
    "several": {**CLOSED, "required": ["x1", "x2"], "patternProperties": {"^x[12]$": SMALL}},
    "one of two patterns": {**CLOSED, "required": ["x1"], "patternProperties": {"^x1$": SMALL, "^y$": {"const": 0}}},
    "more names": {**CLOSED, "required": ["x1"], "patternProperties": {"^x[12]$": SMALL}},
    "nested": {
        "type": "array", "minItems": 1, "maxItems": 2,
        "items": {**CLOSED, "required": ["x1"], "patternProperties": {"^x1$": SMALL}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_comes_to_an_end_and_is_valid(
    compiler: GrammarCompiler, writer: Callable[[Matcher, random.Random], str | None], name: str
) -> None:
    schema = SCHEMAS[name]
    grammar = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    texts = [writer(grammar.new_matcher(), random.Random(seed)) for seed in range(30)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_a_property_that_cannot_satisfy_both_is_refused(compiler: GrammarCompiler) -> None:
    schema = {**SCHEMAS["required"], "properties": {"x1": {"type": "null"}}}
    with pytest.raises(InvalidRequestError, match="required property 'x1' is unsatisfiable"):
        compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
