"""Schemas of fields in bodies, where the models leave more open than the checks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from llmstack_llm.admission.fields import FIELD_CHECKS
from llmstack_llm.admission.rules import DecimalRule, IntegerRule
from llmstack_server.web.sampling import MAX_DEADLINE_MS

Schema = dict[str, Any]

_STRING: Final[Schema] = {"type": "string"}
_NULL: Final[Schema] = {"type": "null"}
_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def _array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


_CONTENT: Final = {"anyOf": [_STRING, _array({"type": ["object", "string"]})]}
_MESSAGE: Final = {
    "anyOf": [
        _object({"role": {"const": "assistant"}}),
        _object({"role": _STRING, "content": _CONTENT}),
    ]
}
MESSAGES: Final = _array(_MESSAGE, minItems=1)
_BLOCKS: Final = _array({"type": "object", "required": ["type"]}, minItems=1)
_TURN: Final = {
    "anyOf": [
        _object({"role": {"enum": ["user", "system"]}, "content": {"anyOf": [_STRING, _BLOCKS]}}),
        _object({"role": {"const": "assistant"}, "content": {"anyOf": [_STRING, _array({"type": "object"})]}}),
    ]
}
TURNS: Final = _array(_TURN, minItems=1)
_TEXT: Final = {"anyOf": [_STRING, _object({"text": _STRING})]}
TEXT_LIST: Final = {"anyOf": [*_TEXT["anyOf"], _array(_TEXT, minItems=1, maxItems=2048)]}
_TOKEN: Final = {"type": "integer", "minimum": 0}
_PROMPTS: Final = {
    "anyOf": [
        _STRING, _array(_STRING, minItems=1), _array(_TOKEN, minItems=1), _array(_array(_TOKEN, minItems=1), minItems=1)
    ]
}  # fmt: skip
_FUNCTION: Final = _object(
    {"name": _NAME},
    description=_nullable("string"), parameters=_nullable("object"), strict=_nullable("boolean"),
)  # fmt: skip
_CHAT_TOOL: Final = _object({"type": {"const": "function"}, "function": _FUNCTION})
_RESPONSE_TOOL: Final = _object({"type": {"enum": ["function", "custom"]}, "name": _NAME})
_MESSAGE_TOOL: Final = _object({"name": _NAME, "input_schema": {"type": "object"}}, type={"enum": [None, "custom"]})
_EXPIRY: Final = _object(
    {"anchor": {"const": "created_at"}, "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000}}
)
BATCH_ENDPOINTS: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
)  # fmt: skip
_RERANK: Final = {"query": _TEXT, "documents": TEXT_LIST}
_INPUT: Final = {"anyOf": [_STRING, _array({"type": "object"}, minItems=1)]}
REQUIRED: Final[Mapping[str, Mapping[str, Schema]]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": _array(MESSAGES, minItems=1, maxItems=128)},
    "/v1/completions": {"prompt": _PROMPTS},
    "/v1/completions/render": {"prompt": _PROMPTS},
    "/v1/responses": {"input": _INPUT},
    "/v1/responses/input_tokens": {"input": _INPUT},
    "/v1/messages": {"messages": TURNS, "max_tokens": {"type": "integer", "minimum": 1}},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/batches": {
        "input_file_id": _STRING, "endpoint": {"enum": [*BATCH_ENDPOINTS]}, "completion_window": {"const": "24h"},
    },
    "/v2/embed": {"texts": TEXT_LIST},
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/detokenize": {"tokens": _array({"type": "integer"})},
}  # fmt: skip
"""Fields that a body must have."""

_CHAT_TOOLS: Final = _array(_CHAT_TOOL, minItems=1, maxItems=128)
_TOOLS: Final[Mapping[str, Schema]] = {
    "/v1/chat/completions": _CHAT_TOOLS, "/v1/chat/completions/render": _CHAT_TOOLS, "/tokenize": _CHAT_TOOLS,
    "/v1/responses": _array(_RESPONSE_TOOL), "/v1/responses/input_tokens": _array(_RESPONSE_TOOL),
    "/v1/messages": _array(_MESSAGE_TOOL), "/v1/messages/count_tokens": _array(_MESSAGE_TOOL),
}  # fmt: skip
_SCORE_LISTS: Final = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_POOLING: Final = ({"input"}, {"messages"})
_ONE_OF: Final[Mapping[str, tuple[set[str], ...]]] = {
    "/v1/embeddings": _POOLING, "/pooling": _POOLING, "/classify": _POOLING, "/tokenize": ({"prompt"}, {"messages"}),
    "/score": tuple(map(set, _SCORE_LISTS)), "/v1/score": tuple(map(set, _SCORE_LISTS)),
    "/v1/estimate": ({"prompt_tokens"}, {"messages"}, {"prompt"}),
}  # fmt: skip
_POOLED: Final[Mapping[str, Schema]] = {"messages": MESSAGES, "input": _PROMPTS}
_NOT_CHAT: Final = {"/v1/chat/completions/batch": ("tools", "tool_choice")}

_TEXTS_AND_ARRAYS: Final[Mapping[str, tuple[str, Schema]]] = {
    "request_id": ("string", {"pattern": "^[!-~]{1,128}$"}),
    "task": ("string", {"enum": ["embed", "classify", "score", "token_embed", "token_classify"]}),
    "truncation": ("string", {"enum": ["auto", "disabled"]}),
    "allowed_token_ids": ("array", {"minItems": 1}),
}


def complete_body(path: str, schema: Schema) -> None:
    """Adds what the checks of a route demand to the schema of its body."""
    properties: dict[str, Schema] = schema["properties"]
    for name in _NOT_CHAT.get(path, ()):
        del properties[name]
    for name, limits in _limits(path).items():
        _limit(properties.get(name, {}), ("integer", "number"), limits)
    for name, (kind, limits) in _TEXTS_AND_ARRAYS.items():
        _limit(properties.get(name, {}), (kind,), limits)
    for name, field in REQUIRED.get(path, {}).items():
        properties[name] = copy.deepcopy(field) | _kept(properties.get(name, {}))
        schema.setdefault("required", []).append(name)
    if path in _TOOLS and "tools" in properties:
        properties["tools"] = {"anyOf": [copy.deepcopy(_TOOLS[path]), _NULL]} | _kept(properties["tools"])
    if path == "/v1/batches":
        properties["output_expires_after"] = {"anyOf": [copy.deepcopy(_EXPIRY), _NULL]}
    choices: list[list[Schema]] = []
    if path in _ONE_OF:
        choices.append(_alternatives(path, properties))
    if {"stream", "stream_options"} <= properties.keys():
        streams = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
        choices.append([{"properties": {"stream_options": _NULL}}, streams])
    if choices:
        schema["allOf"] = [{"anyOf": options} for options in choices]


def _kept(known: Schema) -> Schema:
    return {key: known[key] for key in ("title", "description") if key in known}


def _alternatives(path: str, properties: Mapping[str, Schema]) -> list[Schema]:
    """The sets of fields of which a body has one, with null in place of the others."""
    groups = _ONE_OF[path]
    is_score = groups[0] == set(_SCORE_LISTS[0])
    found = []
    for group in groups:
        others = set().union(*groups) - group
        given = {name: TEXT_LIST if is_score else _POOLED.get(name, {"not": _NULL}) for name in sorted(group)}
        if path in ("/tokenize", "/v1/estimate"):
            given = {name: MESSAGES if name == "messages" else {"not": _NULL} for name in sorted(group)}
        found.append({"required": sorted(group), "properties": given | dict.fromkeys(sorted(others), _NULL)})
    return copy.deepcopy(found)


def _limits(path: str) -> dict[str, Schema]:
    """The ranges of numbers that admission checks on every route that has the field."""
    found: dict[str, Schema] = {"deadline_ms": {"minimum": 1, "maximum": MAX_DEADLINE_MS}}
    if path.startswith(("/v1/messages", "/v1/responses")) or "/render" in path or path == "/v1/estimate":
        return found
    for name, check in FIELD_CHECKS.items():
        rule = getattr(check, "__self__", None)
        if isinstance(rule, IntegerRule):
            found[name] = {"minimum": rule.minimum, "maximum": rule.maximum}
        elif isinstance(rule, DecimalRule):
            least = "exclusiveMinimum" if rule.is_minimum_excluded else "minimum"
            found[name] = {least: rule.minimum, "maximum": rule.maximum}
    return found


def _limit(field: Schema, kinds: tuple[str, ...], limits: Schema) -> None:
    for option in field.get("anyOf", [field]):
        if option.get("type") in kinds:
            option.update(limits)
