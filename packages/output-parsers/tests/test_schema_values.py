"""Values by their schema, also where the type stands behind references and alternatives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_output_parsers import TOOL_PARSERS
from llmstack_output_parsers.schema_values import Schemas
from llmstack_output_parsers.testing import check_output_parser

POINT = {"properties": {"x": {"type": "integer"}}, "type": "object"}
DEFINITIONS = {
    "P": POINT,
    "Alias": {"$ref": "#/$defs/P"},
    "Level": {"enum": [1, 2, 3]},
    "Circle": {"$ref": "#/$defs/Circle"},
    "a/b~c": {"type": "boolean"},
}
REF, NULL = {"$ref": "#/$defs/P"}, {"type": "null"}

TYPED = [
    (REF, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/Alias"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/a~1b~0c"}, "true", True),
    ({"$ref": "#/$defs/Level"}, "2", 2),
    ({"$ref": "#"}, '{"value": 1}', {"value": 1}),
    ({"anyOf": [REF, NULL], "default": None}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [REF, NULL]}, "null", None),
    ({"anyOf": [{"anyOf": [{"type": "integer"}, NULL]}, {"type": "boolean"}]}, "7", 7),
    ({"oneOf": [{"type": ["integer", "null"]}, {"type": "boolean"}]}, "7", 7),
    ({"allOf": [REF], "description": "A point."}, '{"x": 1}', {"x": 1}),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, "7", 7),
    ({"type": "string", "anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", "7"),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "2", 2),
    ({"enum": ["a", "1"]}, "1", "1"),
    ({"const": 1.5}, "1.5", 1.5),
    ({"const": True}, "True", True),
    ({"properties": {"x": {}}}, '{"x": "1"}', {"x": "1"}),
    ({"additionalProperties": {"type": "integer"}}, '{"x": 1}', {"x": 1}),
    ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
    ({"minimum": 0}, "3", 3),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"pattern": "^[0-9]+$"}, "12", "12"),
    ({"$ref": "#/$defs/Circle"}, "12", "12"),
    ({"$ref": "#/$defs/Nothing"}, "12", "12"),
    ({"$ref": "https://example.com/schema"}, "12", "12"),
    ({"anyOf": "nonsense", "enum": 3, "$ref": 5, "type": {}}, "12", "12"),
]
FORMS = {
    "qwen3_coder": "<tool_call><function=f><parameter=value>\n{}\n</parameter></function></tool_call>",
    "seed_oss": "<seed:tool_call><function=f><parameter=value>{}</parameter></function></seed:tool_call>",
    "glm45": "<tool_call>f<arg_key>value</arg_key><arg_value>{}</arg_value></tool_call>",
    "hy_v3": "<tool_calls><tool_call>f<tool_sep><arg_key>value</arg_key><arg_value>{}</arg_value></tool_call>",
    "minimax_m2": '<invoke name="f"><parameter name="value">{}</parameter></invoke>',
    "muse_glimmer": '<atem:invoke name="f"><atem:parameter name="value">{}</atem:parameter></atem:invoke>',
    "step3": '<steptml:invoke name="f"><steptml:parameter name="value">{}</steptml:parameter></steptml:invoke>',
    "deepseek_v4": '<｜DSML｜invoke name="f"><｜DSML｜parameter name="value">{}</｜DSML｜parameter></｜DSML｜invoke>',
    "minimax_m3": ']<]minimax[>[<invoke name="f">]<]minimax[>[<value>{}]<]minimax[>[</value>]<]minimax[>[</invoke>',
}


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"value": schema}, "$defs": DEFINITIONS}


def read(form: str, schema: dict[str, Any], text: str) -> Any:
    tools = {"f": parameters(schema)}
    found = check_output_parser(lambda: TOOL_PARSERS[form](tools), FORMS[form].replace("{}", text))
    ((_, arguments),) = found.calls
    return json.loads(arguments)["value"]


@pytest.mark.parametrize("form", FORMS)
def test_a_value_has_the_type_that_its_schema_gives_it_by_whatever_words(form: str):
    for schema, text, value in TYPED:
        found = read(form, schema, text)
        assert (type(found), found) == (type(value), value), schema


def test_elements_that_nest_follow_references_and_alternatives():
    mark = "]<]minimax[>["
    inner = f"{mark}<points>{mark}<item>{mark}<x>1{mark}</x>{mark}</item>{mark}</points>"
    tools = {"f": {"properties": {"points": {"anyOf": [{"type": "array", "items": REF}, NULL]}}, "$defs": {"P": POINT}}}
    text = f'{mark}<invoke name="f">{inner}{mark}</invoke>'
    found = check_output_parser(lambda: TOOL_PARSERS["minimax_m3"](tools), text, range(0, 200, 7))
    assert json.loads(found.calls[0][1]) == {"points": [{"x": 1}]}


words = st.text("abc xyz", min_size=1, max_size=5)
scalars = st.one_of(st.integers(), st.booleans(), st.none(), words)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2))
NAMES = {bool: "boolean", int: "integer", type(None): "null", str: "string", list: "array", dict: "object"}


@st.composite
def values_with_schemas(draw: st.DrawFn) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A value, a schema that describes it through references and alternatives, and the definitions of these."""
    value = draw(values)
    schema: dict[str, Any] = {"type": NAMES[type(value)]} if draw(st.booleans()) else {"const": value}
    definitions: dict[str, Any] = {}
    for number in range(draw(st.integers(0, 5))):
        way = draw(st.sampled_from(["$ref", "allOf", "anyOf", "oneOf", "described"]))
        if way == "$ref":
            definitions[f"D{number}"] = schema
            schema = {"$ref": f"#/$defs/D{number}"}
        elif way == "described":
            schema = {**schema, "description": "What it is.", "title": "T"}
        else:
            other = [{"type": "null"}] if way != "allOf" and draw(st.booleans()) else []
            schema = {way: draw(st.permutations([schema, *other]))}
    return value, schema, definitions


@given(found=values_with_schemas(), form=st.sampled_from(sorted(FORMS)))
@settings(max_examples=200, deadline=None)
def test_a_value_survives_any_chain_of_references_and_alternatives(
    found: tuple[Any, dict[str, Any], dict[str, Any]], form: str
):
    value, schema, definitions = found
    text = value if isinstance(value, str) else json.dumps(value)
    tools = {"f": {"properties": {"value": schema}, "$defs": definitions}}
    message = check_output_parser(lambda: TOOL_PARSERS[form](tools), FORMS[form].replace("{}", text))
    read_value = json.loads(message.calls[0][1])["value"]
    assert (type(read_value), read_value) == (type(value), value)


def test_schemas_of_any_size_are_read_up_to_a_bound():
    wide: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/W"}] * 32}
    schemas = Schemas({"properties": {"value": wide}, "$defs": {"W": wide}})
    assert schemas.types_of(schemas.of_property("value")) == frozenset()
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        deep = {"anyOf": [deep]}
    assert schemas.types_of(deep) == {"integer"}


@pytest.mark.parametrize("form", ["glm45", "hy_v3", "seed_oss", "qwen3_coder"])
@pytest.mark.parametrize("value", [" ", "    return x", "x  ", "\tx"])
def test_white_space_around_a_text_is_kept(form: str, value: str):
    tools = {"f": {"properties": {"value": {"type": "string"}}}}
    message = check_output_parser(lambda: TOOL_PARSERS[form](tools), FORMS[form].replace("{}", value))
    assert json.loads(message.calls[0][1]) == {"value": value}
