"""The body of `POST /v1/decisions`, and its checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from pydantic import ConfigDict, Field

from llmstack_llm import request_errors
from llmstack_server.apis.decisions.questions import LABELS, Option, Question, QuestionKind
from llmstack_server.web.errors import missing_parameter, unknown_parameter
from llmstack_server.web.fields import RequestBody
from llmstack_server.web.openapi import Schema
from llmstack_server.web.openapi_bodies import array
from llmstack_server.web.unsupported import check_word
from llmstack_types.json_values import JSONObject

MAX_NUM_QUESTIONS: Final = 64
MIN_NUM_OPTIONS, MAX_NUM_LEVELS = 2, 10
_PREDICATE: Final = (Option(False, "false"), Option(True, "true"))
_KINDS: Final[tuple[QuestionKind, ...]] = ("predicate", "choice", "score")
_OPTIONS: Final[Mapping[object, tuple[str, ...]]] = {"choice": ("choices",), "score": ("levels",)}
_CACHE_MARK: Final = "prompt_cache_breakpoint"


class DecisionRequest(RequestBody):
    """Body of `POST /v1/decisions`."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(None, description="a served name; may be left out while one model is served")
    input: object = Field(None, description="what the questions are about: a text, or messages of the user")
    questions: object = Field(None, description="1 to 64 questions; each one is answered by itself")
    safety_identifier: str | None = Field(None, description="without effect: limits are per key")
    prompt_cache_key: str | None = Field(None, description="without effect: prefixes are found by their tokens")
    prompt_cache_options: JSONObject | None = Field(None, description="without effect, as `prompt_cache_key`")


_STRING: Final[Schema] = {"type": "string"}
_STRING_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_PARTS: Final = {"anyOf": [_STRING, array({
    "type": "object", "required": ["type", "text"],
    "properties": {"type": {"const": "input_text"}, "text": _STRING, _CACHE_MARK: {}},
    "additionalProperties": False,
})]}  # fmt: skip


def _question(kind: QuestionKind, **options: Schema) -> Schema:
    return {
        "type": "object", "required": ["type", "instructions", *options], "additionalProperties": False,
        "properties": {"type": {"const": kind}, "name": _STRING_OR_NULL, "instructions": _PARTS, **options},
    }  # fmt: skip


def _options(name: str, value: Schema, maximum: int) -> Schema:
    option = {
        "type": "object", "required": [name], "additionalProperties": False,
        "properties": {name: value, "description": _STRING_OR_NULL},
    }  # fmt: skip
    return array(option, minItems=MIN_NUM_OPTIONS, maxItems=maximum)


INPUT_SCHEMA: Final[Schema] = {"anyOf": [_STRING, array({
    "type": "object", "required": ["role", "content"], "additionalProperties": False,
    "properties": {"type": {"enum": ["message", None]}, "role": {"const": "user"}, "content": _PARTS},
}, minItems=1)]}  # fmt: skip
QUESTIONS_SCHEMA: Final[Schema] = array({"anyOf": [
    _question("predicate"),
    _question("choice", choices=_options("value", {"type": ["string", "boolean"]}, len(LABELS))),
    _question("score", levels=_options("label", _STRING, MAX_NUM_LEVELS)),
]}, minItems=1, maxItems=MAX_NUM_QUESTIONS)  # fmt: skip


def read_input(value: object) -> str:
    """The text that the questions are about; the texts of several messages have an empty line between them.

    Raises:
        InvalidRequestError: Names the part at fault.
    """
    if value is None:
        raise missing_parameter("input")
    if not isinstance(value, list):
        return _text(value, "input", "a string or an array")
    if not value:
        raise request_errors.empty_array("input")
    texts = []
    for index, entry in enumerate(value):
        param = f"input[{index}]"
        message = _object(entry, param, {"role", "content"}, {"type"})
        check_word(f"{param}.type", message.get("type"), ("message",))
        check_word(f"{param}.role", message["role"], ("user",))
        texts.append(_texts(message["content"], f"{param}.content"))
    return "\n\n".join(texts)


def read_questions(value: object) -> list[Question]:
    """The questions in their order.

    Raises:
        InvalidRequestError: Names the part at fault.
    """
    if value is None:
        raise missing_parameter("questions")
    return [
        _read_question(entry, f"questions[{index}]")
        for index, entry in enumerate(_entries(value, "questions", 1, MAX_NUM_QUESTIONS))
    ]


def _read_question(value: object, param: str) -> Question:
    kind = value.get("type") if isinstance(value, dict) else None
    check_word(f"{param}.type", kind, _KINDS)
    required = {"type", "instructions", *_OPTIONS.get(kind, ())}
    fields = _object(value, param, required, {"name"})
    name = fields.get("name")
    question = Question(
        fields["type"],
        _texts(fields["instructions"], f"{param}.instructions"),
        None if name is None else _text(name, f"{param}.name"),
        _read_options(fields, param),
    )
    if len({(type(option.value), option.value) for option in question.options}) < len(question.options):
        raise request_errors.invalid_value(f"{param}.choices", "two of them have the same value")
    return question


def _read_options(fields: JSONObject, param: str) -> tuple[Option, ...]:
    if fields["type"] == "predicate":
        return _PREDICATE
    if fields["type"] == "score":
        levels = _named_options(fields["levels"], f"{param}.levels", "label", MAX_NUM_LEVELS)
        return tuple(
            Option(level, _text(option["label"], f"{where}.label"), _description(option, where))
            for level, (where, option) in enumerate(levels)
        )
    return tuple(
        _choice(option, where)
        for where, option in _named_options(fields["choices"], f"{param}.choices", "value", len(LABELS))
    )


def _named_options(value: object, param: str, name: str, maximum: int) -> list[tuple[str, JSONObject]]:
    """The objects of a list of options, each with its name in the request."""
    entries = _entries(value, param, MIN_NUM_OPTIONS, maximum)
    return [
        (f"{param}[{index}]", _object(entry, f"{param}[{index}]", {name}, {"description"}))
        for index, entry in enumerate(entries)
    ]


def _choice(option: JSONObject, param: str) -> Option:
    value = option["value"]
    if isinstance(value, bool):
        return Option(value, "true" if value else "false", _description(option, param))
    text = _text(value, f"{param}.value", "a string or a boolean")
    return Option(text, text, _description(option, param))


def _description(option: JSONObject, param: str) -> str:
    description = option.get("description")
    return "" if description is None else _text(description, f"{param}.description")


def _entries(value: object, param: str, minimum: int, maximum: int) -> list[object]:
    if not isinstance(value, list):
        raise request_errors.invalid_type(param, "an array", value)
    if len(value) > maximum:
        raise request_errors.array_too_long(param, maximum, len(value))
    if not value:
        raise request_errors.empty_array(param)
    if len(value) < minimum:
        raise request_errors.invalid_value(param, f"expected at least {minimum} of them")
    return value


def _object(value: object, param: str, required: Collection[str], optional: Collection[str]) -> JSONObject:
    """The object, whose fields are known; a null stands for a field that is left out."""
    if not isinstance(value, dict):
        raise request_errors.invalid_type(param, "an object", value)
    for name in value:
        if name not in required and name not in optional:
            raise unknown_parameter(f"{param}.{name}")
    for name in sorted(required):
        if value.get(name) is None:
            raise missing_parameter(f"{param}.{name}")
    return value


def _texts(value: object, param: str) -> str:
    """A text, or the lines of its parts."""
    if not isinstance(value, list):
        return _text(value, param, "a string or an array")
    texts = []
    for index, entry in enumerate(value):
        where = f"{param}[{index}]"
        if isinstance(entry, dict) and entry.get("type") not in (None, "input_text"):
            raise request_errors.unsupported_value(f"{where}.type", "decisions are made about texts alone here")
        part = _object(entry, where, {"type", "text"}, {_CACHE_MARK})
        texts.append(_text(part["text"], f"{where}.text"))
    return "\n".join(texts)


def _text(value: object, param: str, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise request_errors.invalid_type(param, expected, value)
    return value
