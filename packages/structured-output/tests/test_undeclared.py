"""Objects have the properties that their schemas declare, and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmstack_structured_output import GrammarCompiler, Matcher
from llmstack_structured_output.undeclared import TooManyNamesError, without_undeclared
from llmstack_types import InvalidRequestError, StructuredOutputsParams

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
Y = {"type": "object", "properties": {"y": {"type": "integer"}}}
DEFS = {"$defs": {"X": X, "Y": Y}}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


# A schema, texts that it allows, and texts that JSON Schema's letter alone allows.
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "properties": (X, ['{"x":1}'], ['{"x":1,"z":2}']),
    "none": ({"type": "object", "properties": {}}, ["{}"], ['{"z":1}']),
    "nested": (
        {"type": "object", "properties": {"a": {"type": "array", "items": X}}},
        ["{}", '{"a":[{"x":1}]}'],
        ['{"a":[{"x":1,"z":1}]}'],
    ),
    "an optional property": ({**Y}, ["{}", '{"y":1}'], ['{"z":1}']),
    "a required one that is not described": ({**Y, "required": ["b"]}, ['{"y":1,"b":[]}'], ['{"b":1,"z":2}']),
    "a reference": (
        {**DEFS, "type": "object", "properties": {"p": ref("X")}},
        ['{"p":{"x":1}}'],
        ['{"p":{"x":1,"z":1}}'],
    ),
    "a reference with siblings": (
        {**DEFS, **ref("X"), "properties": {"b": {"type": "null"}}},
        ['{"x":1}', '{"x":1,"b":null}'],
        ['{"x":1,"z":1}'],
    ),
    "allOf": ({**DEFS, "allOf": [ref("X"), ref("Y")]}, ['{"x":1,"y":2}', '{"x":1}'], ['{"x":1,"z":1}']),
    "a schema that is used alone and together": (
        {**DEFS, "allOf": [ref("X"), {"properties": {"p": ref("X")}}]},
        ['{"x":1,"p":{"x":2}}'],
        ['{"x":1,"p":{"x":2,"z":1}}', '{"x":1,"z":1}'],
    ),
    "anyOf": ({**DEFS, "anyOf": [ref("X"), ref("Y"), {"type": "null"}]}, ['{"x":1}', '{"y":1}', "null"], ['{"z":1}']),
    "properties beside anyOf": (
        {**DEFS, "type": "object", "properties": {"k": {"type": "null"}}, "anyOf": [ref("X"), ref("Y")]},
        ['{"k":null,"x":1}', '{"k":null,"y":1}', "{}"],
        ['{"z":1}', '{"k":null,"z":1}'],
    ),
    "one of two is needed": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1,"z":1}'],
    ),
    "recursion": (
        {**ref("N"), "$defs": {"N": {"type": "object", "properties": {"n": {"anyOf": [ref("N"), {"type": "null"}]}}}}},
        ["{}", '{"n":{"n":null}}'],
        ['{"n":{"z":1}}'],
    ),
}  # fmt: skip
# Schemas that say themselves what else there may be.
LEFT_ALONE = {
    "additionalProperties": {**X, "additionalProperties": True},
    "a schema of the others": {**X, "additionalProperties": {"type": "integer"}},
    "patternProperties": {**X, "patternProperties": {"^z": {"type": "integer"}}},
    "one of several says it": {"allOf": [X, {"additionalProperties": {"type": "integer"}}]},
    "no properties": {"type": "object"},
    "more are needed": {**X, "minProperties": 2},
    "in a constant": {"const": {"x": 1, "z": 2}},
}


def can_be_written(compiler: GrammarCompiler, schema: Any, text: str, *, is_closed: bool | None = None) -> bool:
    params = StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=is_closed)
    matcher = compiler.compile(params).new_matcher()
    return matcher.accept(text.encode()) and matcher.is_complete


@pytest.mark.parametrize("name", CASES)
def test_others_are_forbidden_where_a_schema_says_nothing_of_them(compiler: GrammarCompiler, name: str) -> None:
    schema, allowed, others = CASES[name]
    assert [text for text in allowed if not can_be_written(compiler, schema, text)] == []
    assert [text for text in others if can_be_written(compiler, schema, text)] == []


@pytest.mark.parametrize("name", CASES)
def test_the_letter_of_json_schema_allows_others(compiler: GrammarCompiler, name: str) -> None:
    schema, _, others = CASES[name]
    assert [text for text in others if not can_be_written(compiler, schema, text, is_closed=False)] == []


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_schema_that_speaks_of_others_is_left_alone(compiler: GrammarCompiler, name: str) -> None:
    assert can_be_written(compiler, LEFT_ALONE[name], '{"x":1,"z":2}')


def test_schemas_in_structural_tags_have_no_others_either(compiler: GrammarCompiler) -> None:
    tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": X}})
    params = [StructuredOutputsParams(structural_tag=tag, disable_additional_properties=off) for off in (None, False)]
    matchers = [compiler.compile(one).new_matcher() for one in params]
    assert [matcher.accept(b'{"x":1,"z":2}') for matcher in matchers] == [False, True]


def test_alternatives_that_would_repeat_too_many_names_are_refused(compiler: GrammarCompiler) -> None:
    properties = {f"p{index}": {} for index in range(400)}
    schema = {"properties": properties, "anyOf": [{"required": [f"p{index}"]} for index in range(400)]}
    with pytest.raises(TooManyNamesError):
        without_undeclared(schema)
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutputsParams(json=schema))
    assert caught.value.code == "schema_too_complex"


PROPERTIES = st.sampled_from(["a", "b", "c"])
DEFINED = ["P", "Q", "R"]
SCALARS = st.sampled_from([{"type": "integer"}, {"type": "null"}, {"enum": ["u", "v"]}])
VALUES = st.one_of(
    SCALARS,
    st.sampled_from(DEFINED).map(ref),
    st.sampled_from(DEFINED).map(lambda name: {"anyOf": [ref(name), {"type": "null"}]}),
    st.sampled_from(DEFINED).map(lambda name: {"type": "array", "items": ref(name), "maxItems": 2}),
    st.sampled_from(DEFINED).map(lambda name: {"allOf": [ref(name)], "description": "as pydantic writes it"}),
)


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(PROPERTIES, values, max_size=3))
    required = [name for name in properties if draw(st.integers(0, 3)) == 0]
    others = draw(st.sampled_from([{}, {}, {}, {"additionalProperties": False}]))
    return {"type": "object", "properties": properties, "required": required, **others}


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Objects that refer to each other, and schemas that describe one object together."""
    defined = {name: draw(objects(VALUES)) for name in DEFINED}
    one, two = draw(st.sampled_from(DEFINED)), draw(st.sampled_from(DEFINED))
    root = draw(
        st.one_of(
            objects(VALUES),
            st.just({"allOf": [ref(one), ref(two)]}),
            objects(SCALARS).map(lambda value: {"allOf": [ref(one), value]}),
            objects(SCALARS).map(lambda value: {**value, **ref(one)}),
            objects(SCALARS).map(lambda value: {**value, "anyOf": [ref(one), ref(two)]}),
        )
    )
    return {**root, "$defs": defined}


def closed(node: Any) -> Any:
    """What it means, in the words of JSON Schema: at the places of whole values nothing is left unevaluated."""
    if not isinstance(node, dict):
        return node
    schema = _with_closed_parts(node)
    is_object = any(key in node for key in ("properties", "$ref", "allOf", "anyOf"))
    return schema | {"unevaluatedProperties": False} if is_object else schema


def _with_closed_parts(node: dict[str, Any]) -> dict[str, Any]:
    schema = dict(node)
    if "properties" in node:
        schema["properties"] = {name: closed(value) for name, value in node["properties"].items()}
    if "items" in node:
        schema["items"] = closed(node["items"])
    for key in ("allOf", "anyOf"):
        if key in node:
            schema[key] = [_with_closed_parts(branch) for branch in node[key]]
    if "$defs" in node:
        schema["$defs"] = {name: _with_closed_parts(value) for name, value in node["$defs"].items()}
    return schema


Writer = Callable[[Matcher, random.Random], str | None]


def check_declared(compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any], seed: int) -> None:
    """Nothing undeclared is written, and all that is declared can be."""
    expected = jsonschema.Draft202012Validator(closed(schema))
    letter = StructuredOutputsParams(json=json.dumps(schema), disable_additional_properties=False)
    try:
        free = compiler.compile(letter)
    except InvalidRequestError:
        return  # the library does not support it, or nothing is valid under it
    try:
        grammar = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except InvalidRequestError as error:  # two schemas of one property that declare different ones exclude each other
        if "nsatisfiable" not in error.message:
            raise
        return
    rng = random.Random(seed)
    for _ in range(5):
        text = writer(grammar.new_matcher(), rng)
        if text is not None:
            expected.validate(json.loads(text))
        text = writer(free.new_matcher(), rng)
        if text is not None and expected.is_valid(json.loads(text)):
            matcher = grammar.new_matcher()
            assert matcher.accept(text.encode())
            assert matcher.is_complete


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_nothing_undeclared_is_written_and_all_that_is_declared_can_be(
    compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any], seed: int
) -> None:
    check_declared(compiler, writer, schema, seed)


@pytest.mark.full
@settings(max_examples=5000, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_nothing_undeclared_is_written_under_thousands_of_schemas(
    compiler: GrammarCompiler, writer: Writer, schema: dict[str, Any], seed: int
) -> None:
    check_declared(compiler, writer, schema, seed)
