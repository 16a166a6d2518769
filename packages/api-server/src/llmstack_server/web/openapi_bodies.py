"""Schemas of request bodies: their models, and what the checks demand besides."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel

from llmstack_llm.admission.fields import RANGES
from llmstack_llm.admission.rules import IntegerRule
from llmstack_server.web.openapi import Schema
from llmstack_server.web.sampling import MAX_DEADLINE_MS

_STRING: Final[Schema] = {"type": "string"}
_NULL: Final[Schema] = {"type": "null"}
_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_CONTENT: Final = {"anyOf": [_STRING, array({"type": ["object", "string"]})]}
_MESSAGE: Final = {
    "anyOf": [
        _object({"role": {"const": "assistant"}}),
        _object({"role": _STRING, "content": _CONTENT}),
    ]
}
MESSAGES: Final = array(_MESSAGE, minItems=1)
_BLOCKS: Final = array({"type": "object", "required": ["type"]}, minItems=1)
_TURN: Final = {
    "anyOf": [
        _object({"role": {"enum": ["user", "system"]}, "content": {"anyOf": [_STRING, _BLOCKS]}}),
        _object({"role": {"const": "assistant"}, "content": {"anyOf": [_STRING, array({"type": "object"})]}}),
    ]
}
TURNS: Final = array(_TURN, minItems=1)
_PARTS: Final = array({"type": "object"}, minItems=1)
_TEXT: Final = {"anyOf": [_STRING, _object({"text": _STRING})]}
TEXT_LIST: Final = {"anyOf": [*_TEXT["anyOf"], array(_TEXT, minItems=1, maxItems=2048)]}
_COMPARED: Final = {"anyOf": [*_TEXT["anyOf"], _object({"content": {"anyOf": [_STRING, _PARTS]}})]}
_COMPARED_LIST: Final = {"anyOf": [*_COMPARED["anyOf"], array(_COMPARED, minItems=1, maxItems=2048)]}
_TOKEN: Final = {"type": "integer", "minimum": 0}
PROMPTS: Final = {
    "anyOf": [
        _STRING, array(_STRING, minItems=1), array(_TOKEN, minItems=1), array(array(_TOKEN, minItems=1), minItems=1)
    ]
}  # fmt: skip
_FUNCTION: Final = _object(
    {"name": _NAME},
    description=_nullable("string"), parameters=_nullable("object"), strict=_nullable("boolean"),
)  # fmt: skip
_CHAT_TOOL: Final = _object({"type": {"const": "function"}, "function": _FUNCTION})
_RESPONSE_TOOL: Final = _object({"type": {"enum": ["function", "custom"]}, "name": _NAME})
_MESSAGE_TOOL: Final = _object({"name": _NAME, "input_schema": {"type": "object"}}, type={"enum": [None, "custom"]})
EXPIRY: Final = _object(
    {"anchor": {"const": "created_at"}, "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000}}
)
RERANK: Final = {"query": _COMPARED, "documents": _COMPARED_LIST}
INPUT: Final = {"anyOf": [_STRING, array({"type": "object"}, minItems=1)]}
ANY: Final[Schema] = {"not": _NULL}
CHAT_TOOLS: Final = array(_CHAT_TOOL, minItems=1, maxItems=128)
RESPONSE_TOOLS: Final = array(_RESPONSE_TOOL)
MESSAGE_TOOLS: Final = array(_MESSAGE_TOOL)
POOLING: Final = ({"input": PROMPTS}, {"messages": MESSAGES})
SCORES: Final = tuple(
    dict.fromkeys(pair, _COMPARED_LIST)
    for pair in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
)

_TEXTS_AND_ARRAYS: Final[Mapping[str, tuple[str, Schema]]] = {
    "request_id": ("string", {"pattern": "^[!-~]{1,128}$"}),
    "task": ("string", {"enum": ["embed", "classify", "score", "token_embed", "token_classify"]}),
    "truncation": ("string", {"enum": ["auto", "disabled"]}),
    "allowed_token_ids": ("array", {"minItems": 1}),
}


@dataclass(frozen=True, slots=True)
class FixedBody:
    """A request with a schema that no model has."""

    fixed_schema: Schema
    media_type: str = "application/json"

    def schema(self) -> Schema:
        """The schema as it was given."""
        return self.fixed_schema


class RequestBody:
    """The JSON of a request, by its model. The schema takes ten milliseconds, so it is made when the document is.

    Models leave more open than the checks of a route. What is given here narrows them.
    """

    media_type = "application/json"

    def __init__(
        self,
        model: type[BaseModel],
        *,
        required: Mapping[str, Schema] = MappingProxyType({}),
        one_of: Sequence[Mapping[str, Schema]] = (),
        fields: Mapping[str, Schema] = MappingProxyType({}),
        without: Sequence[str] = (),
        has_ranges: bool = True,
    ) -> None:
        """Takes what the checks demand.

        Args:
            model: The fields and their types.
            required: Fields that a body must have.
            one_of: Sets of fields of which a body has one.
            fields: Schemas of further fields, in place of those of the model.
            without: Fields of the model that the route does not take.
            has_ranges: Whether admission checks the ranges of numbers.
        """
        self._model = model
        self._required = required
        self._one_of = one_of
        self._fields = fields
        self._without = without
        self._has_ranges = has_ranges

    def schema(self) -> Schema:
        """The schema of the body, with nested models inlined: FastAPI does not know these models."""
        schema = _inlined_schema(self._model)
        properties: dict[str, Schema] = schema["properties"]
        for name in self._without:
            del properties[name]
        for name, limits in _ranges(is_admitted=self._has_ranges).items():
            _limit(properties.get(name, {}), ("integer", "number"), limits)
        for name, (kind, limits) in _TEXTS_AND_ARRAYS.items():
            _limit(properties.get(name, {}), (kind,), limits)
        with_required(schema, self._required)
        for name, field in self._fields.items():
            properties[name] = {"anyOf": [copy.deepcopy(field), _NULL]} | _kept(properties[name])
        choices = [list(_alternatives(self._one_of))] if self._one_of else []
        if {"stream", "stream_options"} <= properties.keys():
            streams = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
            choices.append([{"properties": {"stream_options": _NULL}}, streams])
        if choices:
            schema["allOf"] = [{"anyOf": options} for options in choices]
        return schema


class AnyRequestBody:
    """The JSON of a request that any of several other routes takes."""

    media_type = "application/json"

    def __init__(self, names: Sequence[str]) -> None:
        """A body has one of the fields with these names."""
        self._names = names

    def schema(self) -> Schema:
        """An object with one of the fields."""
        return {
            "type": "object",
            "anyOf": [{"required": [name]} for name in self._names],
            "description": "a request to any generating or pooling route",
        }


def with_required(schema: Schema, fields: Mapping[str, Schema]) -> Schema:
    """The schema, which is changed, with fields that a body must have."""
    properties = schema["properties"]
    for name, field in fields.items():
        properties[name] = copy.deepcopy(field) | _kept(properties.get(name, {}))
        schema.setdefault("required", []).append(name)
    return schema


def _inlined_schema(model: type[BaseModel]) -> Schema:
    schema: Schema = _without_null_defaults(model.model_json_schema(ref_template="#/components/schemas/{model}"))
    definitions = schema.pop("$defs", {})
    for field in schema["properties"].values():
        for option in field.get("anyOf", ()):
            if "$ref" in option:
                option.update(definitions[option.pop("$ref").rpartition("/")[2]])
    return schema


def _without_null_defaults(schema: object) -> Any:
    """The schema without defaults of null: most fields have one."""
    if isinstance(schema, list):
        return [_without_null_defaults(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    is_left_out = schema.get("default", schema) is None
    return {
        name: _without_null_defaults(part) for name, part in schema.items() if not (is_left_out and name == "default")
    }


def _kept(known: Schema) -> Schema:
    return {key: known[key] for key in ("title", "description") if key in known}


def _alternatives(groups: Sequence[Mapping[str, Schema]]) -> Iterator[Schema]:
    """The sets of fields of which a body has one, with null in place of the others."""
    names = set().union(*groups)
    for group in groups:
        others = dict.fromkeys(sorted(names - group.keys()), _NULL)
        given = {name: group[name] for name in sorted(group)}
        yield {"required": sorted(group), "properties": copy.deepcopy(given) | others}


def _ranges(*, is_admitted: bool) -> dict[str, Schema]:
    """The ranges of numbers that every route with the field checks, and those that admission checks."""
    found: dict[str, Schema] = {"deadline_ms": {"minimum": 1, "maximum": MAX_DEADLINE_MS}}
    for name, rule in (RANGES if is_admitted else {}).items():
        if isinstance(rule, IntegerRule):
            found[name] = {"minimum": rule.minimum, "maximum": rule.maximum}
        else:
            least = "exclusiveMinimum" if rule.is_minimum_excluded else "minimum"
            found[name] = {least: rule.minimum, "maximum": rule.maximum}
    return found


def _limit(field: Schema, kinds: tuple[str, ...], limits: Schema) -> None:
    for option in field.get("anyOf", [field]):
        if option.get("type") in kinds:
            option.update(limits)
