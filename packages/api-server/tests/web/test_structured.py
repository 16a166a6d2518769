"""What a request says about the form of its output."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_server.apis.openai.protocol import CompletionRequest
from llmstack_server.web.fields import parse
from llmstack_server.web.structured import structured_names, structured_outputs
from llmstack_types import InvalidRequestError, StructuredOutputsParams

SCHEMA = {"type": "object"}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def fields(**body: Any) -> CompletionRequest:
    return parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}, "guided_json_object": False}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": NAMED}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            StructuredOutputsParams(structural_tag={"type": "structural_tag", "structures": [], "triggers": []}),
        ),
        (
            {"structured_outputs": {"regex": "a", "json": None, "disable_fallback": True}},
            StructuredOutputsParams(regex="a"),
        ),
        (
            {
                "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
                "response_format": {"type": "text"},
            },
            StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        ),
        (
            {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
            StructuredOutputsParams(choice=["a"], whitespace_pattern=" "),
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
            StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" "),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
            StructuredOutputsParams(json=SCHEMA, disable_additional_properties=False),
        ),
        ({"structured_outputs": {"disable_additional_properties": False}}, None),
        (
            {"structured_outputs": {"disable_additional_properties": True, "whitespace_pattern": " "}}
            | {"response_format": NAMED},
            StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True, whitespace_pattern=" "),
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}, "guided_json": SCHEMA},
            StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
        ),
        ({"guided_json": False}, StructuredOutputsParams(json=False)),  # a schema that allows nothing
        ({"guided_regex": "a"}, StructuredOutputsParams(regex="a")),
        ({"guided_choice": ["a"]}, StructuredOutputsParams(choice=["a"])),
        ({"guided_grammar": "start: x"}, StructuredOutputsParams(grammar="start: x")),
        ({"guided_json_object": True}, StructuredOutputsParams(json_object=True)),
        ({"regex": "a"}, StructuredOutputsParams(regex="a")),
        ({"ebnf": "root ::= x"}, StructuredOutputsParams(grammar="root ::= x")),
        (
            {"grammar": "root ::= x", "regex": "", "ebnf": "", "json_schema": ""},
            StructuredOutputsParams(grammar="root ::= x"),
        ),
        ({"json_schema": False}, StructuredOutputsParams(json=False)),
        ({"structural_tag": "{}"}, StructuredOutputsParams(structural_tag="{}")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}},
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"response_format": {"type": "json", "value": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"response_format": {"type": "regex", "value": "a"}}, StructuredOutputsParams(regex="a")),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}, "response_format": NAMED},
            StructuredOutputsParams(json=SCHEMA),
        ),
    ],
    ids=str,
)
def test_every_form_becomes_one_constraint(body: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    assert structured_outputs(fields(**body)) == expected


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json"}}, "response_format.value", "missing_required_parameter"),
        ({"response_format": {"type": "regex"}}, "response_format.value", "missing_required_parameter"),
        ({"response_format": {"type": "regex", "value": 1}}, "response_format.value", "invalid_type"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "invalid_type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": 1}}, "response_format.json_schema", "invalid_type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
            "response_format.json_schema.schema",
            "invalid_type",
        ),
        ({"response_format": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs", "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unsupported_parameter"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_is_no_form_is_refused_by_name(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        structured_outputs(fields(**body))
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        ({"response_format": NAMED}, "json", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"guided_regex": "a"}, "regex", "guided_regex"),
        ({"guided_json": {}, "guided_whitespace_pattern": "["}, "whitespace_pattern", "guided_whitespace_pattern"),
    ],
    ids=str,
)
def test_errors_name_the_field_that_the_request_has(body: dict[str, Any], kind: str, name: str) -> None:
    assert structured_names(fields(**body))[f"structured_outputs.{kind}"] == name


def test_the_newest_name_is_its_own() -> None:
    assert structured_names(fields(structured_outputs={"regex": "a"})) == {}
    assert structured_names(fields()) == {}
