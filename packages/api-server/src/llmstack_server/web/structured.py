"""Constraints on the output: `response_format`, `structured_outputs`, other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from llmstack_llm import GivenSampling, request_errors
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import GenerationFields
from llmstack_types import StructuredOutputsParams
from llmstack_types.json_values import JSONObject, JSONValue

# Other names of a constraint, and the kind that they mean.
_OTHER_NAMES: Mapping[str, str] = {
    # vLLM's older names
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    # SGLang's; the last two are llama.cpp's as well
    "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag",
    "grammar": "grammar", "json_schema": "json",
}  # fmt: skip
# Values that clients send for "no constraint".
_UNSET: Mapping[str, JSONValue] = {"guided_json_object": False} | dict.fromkeys(
    ("grammar", "ebnf", "regex", "json_schema"), ""
)
CONSTRAINT_FIELDS = frozenset({"response_format", "structured_outputs", *_OTHER_NAMES})
"""Fields of a request that may hold a constraint."""

_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")
# Accepted without effect, since there is one backend.
_HARMLESS = {"disable_fallback": (None, True, False)}
_RESPONSE_FORMAT_NAMES = {
    "structured_outputs": "response_format",
    "structured_outputs.json_object": "response_format",
    "structured_outputs.structural_tag": "response_format",
    "structured_outputs.regex": "response_format.value",
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


def constraint_options(value: Mapping[str, object] | None) -> JSONObject:
    """The options in `structured_outputs`, which hold for a constraint by another field or by tools too."""
    return {name: value[name] for name in _OPTIONS if value.get(name) is not None} if value else {}


def with_form(
    sampling: GivenSampling, form: StructuredOutputsParams | None, fields: GenerationFields, names: Mapping[str, str]
) -> GivenSampling:
    """The sampling fields with the form of the answer; `names` are the request's for that constraint and its parts.

    Raises:
        InvalidRequestError: They have another constraint already.
    """
    if form is None:
        return sampling
    if "structured_outputs" in sampling.values:
        param = names["structured_outputs"]
        raise request_errors.invalid_value(param, "it cannot be combined with another constraint")
    form = dataclasses.replace(form, **constraint_options(fields.structured_outputs))
    return GivenSampling({**sampling.values, "structured_outputs": form}, {**sampling.names, **names})


def _from_source(fields: GenerationFields, source: str) -> StructuredOutputsParams:
    if source == "response_format":
        constraint = _from_response_format(fields.response_format or {})
        return dataclasses.replace(constraint, **constraint_options(fields.structured_outputs))
    if source == "structured_outputs":
        return _from_object(fields.structured_outputs or {})
    given = {_OTHER_NAMES[source]: getattr(fields, source)}
    options = {"whitespace_pattern": fields.guided_whitespace_pattern, **constraint_options(fields.structured_outputs)}
    return StructuredOutputsParams(**given, **options)


def structured_names(fields: GenerationFields) -> Mapping[str, str]:
    """Parts of the constraint to their names in the request, for errors of the grammar compiler."""
    sources = _sources(fields)
    if not sources or sources[0] == "structured_outputs":
        return {}
    if sources[0] == "response_format":
        schema = _schema_path(fields.response_format or {})
        return {**_RESPONSE_FORMAT_NAMES, "structured_outputs.json": f"response_format.{schema}"}
    kind = f"structured_outputs.{_OTHER_NAMES[sources[0]]}"
    whitespace = {"structured_outputs.whitespace_pattern": "guided_whitespace_pattern"}
    return {"structured_outputs": sources[0], kind: sources[0]} | whitespace


def _sources(fields: GenerationFields) -> list[str]:
    """The names of the fields that set a constraint."""
    found = []
    response_format = fields.response_format
    if response_format is not None and response_format.get("type") != "text":
        found.append("response_format")
    if fields.structured_outputs is not None and not _has_options_alone(fields.structured_outputs):
        found.append("structured_outputs")
    return found + [name for name in _OTHER_NAMES if getattr(fields, name) not in (None, _UNSET.get(name))]


def _has_options_alone(value: Mapping[str, object]) -> bool:
    return bool(value) and value.keys() <= {*_OPTIONS, *_HARMLESS}


def _from_response_format(value: Mapping[str, object]) -> StructuredOutputsParams:
    kind = value.get("type")
    if kind is None:
        raise missing_parameter("response_format.type")
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    if kind == "regex":
        return StructuredOutputsParams(regex=_part(value, "value", str, "a string"))
    if kind not in ("json_object", "json_schema", "json"):
        reason = "expected 'text', 'json_object', 'json_schema', 'json', 'regex' or 'structural_tag'"
        raise request_errors.invalid_value("response_format.type", reason)
    path = _schema_path(value)
    if path in _BARE_SCHEMAS:
        return StructuredOutputsParams(json=_part(value, path, dict, "an object"))
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=_named_schema(value, path.partition(".")[0]))


# Where llama.cpp's server and TGI have a schema without a name.
_BARE_SCHEMAS = ("schema", "value")


def _schema_path(value: Mapping[str, object]) -> str:
    """The place of the schema in a format: OpenAI's, or one of the others."""
    kind = value.get("type")
    if value.get("json_schema") is None and value.get("schema") is not None:
        return "schema"
    if kind == "json_schema":
        return "value.schema" if value.get("json_schema") is None and value.get("value") else "json_schema.schema"
    return "value" if kind == "json" or value.get("value") is not None else "json_schema.schema"


def _part(value: Mapping[str, object], name: str, type_: type, expected: str) -> Any:
    """A part of a format that has to be there."""
    if value.get(name) is None:
        raise missing_parameter(f"response_format.{name}")
    if not isinstance(value[name], type_):
        raise request_errors.invalid_type(f"response_format.{name}", expected, value[name])
    return value[name]


def _named_schema(response_format: Mapping[str, object], place: str) -> Mapping[str, JSONValue]:
    param, value = f"response_format.{place}", response_format.get(place)
    if value is None:
        raise missing_parameter(param)
    if not isinstance(value, dict):
        raise request_errors.invalid_type(param, "an object", value)
    for key, type_, expected in (("name", str, "a string"), ("schema", dict, "an object")):
        if value.get(key) is None:
            raise missing_parameter(f"{param}.{key}")
        if not isinstance(value[key], type_):
            raise request_errors.invalid_type(f"{param}.{key}", expected, value[key])
    schema: dict[str, object] = value["schema"]
    return schema


def _from_object(value: Mapping[str, JSONValue]) -> StructuredOutputsParams:
    for name, entry in value.items():
        if name not in _FIELDS and entry not in _HARMLESS.get(name, (None,)):
            shown = f"structured_outputs.{request_errors.echo(name)}"
            raise request_errors.unsupported_parameter(shown, f"'{shown}' is not supported by this server")
    given = {name: value[name] for name in _FIELDS if value.get(name) is not None}
    return StructuredOutputsParams(**given)
