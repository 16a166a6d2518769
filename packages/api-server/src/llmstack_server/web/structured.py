"""Constraints on the output: `response_format`, `structured_outputs`, `guided_*`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import GenerationFields
from llmstack_types import StructuredOutputsParams

_OLD_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
CONSTRAINT_FIELDS = frozenset({"response_format", "structured_outputs", *_OLD_NAMES})
"""Fields of a request that may hold a constraint."""

_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
# Accepted without effect: there is one backend, and schemas define the allowed properties themselves.
_HARMLESS = {"disable_fallback": (None, True, False), "disable_additional_properties": (None, False)}
_RESPONSE_FORMAT_NAMES = {
    "structured_outputs": "response_format",
    "structured_outputs.json": "response_format.json_schema.schema",
    "structured_outputs.json_object": "response_format",
    "structured_outputs.structural_tag": "response_format",
}


def structured_outputs(fields: GenerationFields) -> StructuredOutputsParams | None:
    """The constraint of a request; None for free text. A schema holds whether or not it is `strict`.

    Raises:
        InvalidRequestError: The request has an invalid constraint, or several.
    """
    sources = _sources(fields)
    if not sources:
        return None
    found = _from_source(fields, sources[0])
    for source in sources[1:]:
        if _from_source(fields, source) != found:
            raise request_errors.invalid_value(source, f"it cannot be combined with '{sources[0]}'")
    return found


def _from_source(fields: GenerationFields, source: str) -> StructuredOutputsParams:
    if source == "response_format":
        return _from_response_format(fields.response_format or {})
    if source == "structured_outputs":
        return _from_object(fields.structured_outputs or {})
    constraint: dict[str, Any] = {source.removeprefix("guided_"): getattr(fields, source)}
    return StructuredOutputsParams(**constraint, whitespace_pattern=fields.guided_whitespace_pattern)


def structured_names(fields: GenerationFields) -> Mapping[str, str]:
    """Parts of the constraint to their names in the request, for errors of the grammar compiler."""
    sources = _sources(fields)
    if not sources or sources[0] == "structured_outputs":
        return {}
    if sources[0] == "response_format":
        return _RESPONSE_FORMAT_NAMES
    kind = f"structured_outputs.{sources[0].removeprefix('guided_')}"
    whitespace = {"structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
    return {"structured_outputs": sources[0], kind: sources[0]} | whitespace


def _sources(fields: GenerationFields) -> list[str]:
    """The names of the fields that set a constraint."""
    found = []
    response_format = fields.response_format
    if response_format is not None and response_format.get("type") != "text":
        found.append("response_format")
    if fields.structured_outputs is not None:
        found.append("structured_outputs")
    return found + [name for name in _OLD_NAMES if getattr(fields, name) not in (None, False)]


def _from_response_format(value: Mapping[str, Any]) -> StructuredOutputsParams:
    kind = value.get("type")
    if kind is None:
        raise missing_parameter("response_format.type")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    if kind != "json_schema":
        reason = "expected 'text', 'json_object', 'json_schema' or 'structural_tag'"
        raise request_errors.invalid_value("response_format.type", reason)
    return StructuredOutputsParams(json=_named_schema(value.get("json_schema")))


def _named_schema(value: Any) -> Mapping[str, Any]:
    param = "response_format.json_schema"
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, dict):
        raise request_errors.invalid_type(param, "an object", value)
    for key, type_, expected in (("name", str, "a string"), ("schema", dict, "an object")):
        if value.get(key) is None:
            raise missing_parameter(f"{param}.{key}")
        if not isinstance(value[key], type_):
            raise request_errors.invalid_type(f"{param}.{key}", expected, value[key])
    schema: dict[str, Any] = value["schema"]
    return schema


def _from_object(value: Mapping[str, Any]) -> StructuredOutputsParams:
    for name, entry in value.items():
        if name not in _FIELDS and entry not in _HARMLESS.get(name, (None,)):
            shown = f"structured_outputs.{request_errors.echo(name)}"
            raise request_errors.unsupported_parameter(shown, f"'{shown}' is not supported by this server")
    given = {name: value[name] for name in _FIELDS if value.get(name) is not None}
    return StructuredOutputsParams(**given)
