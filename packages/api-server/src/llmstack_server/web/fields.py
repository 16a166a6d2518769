"""Fields that requests share, and their types; admission checks the values."""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema

from llmstack_llm import request_errors
from llmstack_llm.admission.rules import MAX_LOGIT_BIAS_ENTRIES
from llmstack_server.web.errors import missing_parameter, unknown_parameter
from llmstack_types import InvalidRequestError, SamplingParams
from llmstack_types.field_facts import facts_of
from llmstack_types.json_values import JSONObject

# Not `float`: a number of 400 digits is no float, and must still reach the check of its field's range.
Decimal = int | float
"""An object of a request or an answer."""


def _fail_fast(schema: object) -> None:
    entries = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    for entry in entries:
        _fail_fast(entry)
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True


class RequestBody(BaseModel):
    """A body whose lists end at their first error: a million errors of one list would take 10 s."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of the model, with all lists failing fast."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


def at_most(max_entries: int, param: str) -> BeforeValidator:
    """Refuses an object of more entries before it looks at any."""

    def check(value: object) -> Any:
        if isinstance(value, dict) and len(value) > max_entries:
            raise request_errors.too_many_properties(param, max_entries, len(value))
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    """The `stream_options` object of a request."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


_TYPES: Mapping[str, Any] = {
    "logit_bias": Annotated[dict[str, Decimal], at_most(MAX_LOGIT_BIAS_ENTRIES, "logit_bias")],
    "repetition_detection": JSONObject,
}


def _type_of(name: str, hint: object) -> Any:
    """The type of a field of `SamplingParams` in a request; `Any` where several are."""
    if name in _TYPES:
        return _TYPES[name]
    [first, *others] = [one for one in get_args(hint) or (hint,) if one is not type(None)]
    if get_origin(first) is tuple and [get_origin(one) for one in others] == [list]:
        return GenericAlias(list, get_args(first)[:1])
    return Any if others else Decimal if first is float else first


def sampling_fields(given_by: str) -> dict[str, Any]:
    """The fields of `SamplingParams` that requests of this kind give, in the form of `create_model`."""
    hints = get_type_hints(SamplingParams)
    fields = {}
    for name, facts in facts_of(SamplingParams).items():
        if facts.given_by == given_by:
            kind = _type_of(name, hints[name])
            fields[name] = (kind if kind is Any else kind | None, Field(None, description=facts.help))
    return fields


if TYPE_CHECKING:

    class SamplingFields(RequestBody):
        """The fields of `SamplingParams` that all generating requests give."""

        # Those that code names, for the type checker.
        n: int | None
        best_of: int | None
        use_beam_search: bool | None
        temperature: Decimal | None
        seed: int | None
        max_tokens: int | None
        prompt_logprobs: int | None

else:
    SamplingFields = create_model("SamplingFields", __base__=RequestBody, **sampling_fields("all"))


class GenerationFields(SamplingFields):
    """Fields of all generating requests; None means the default."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="a served name; may be left out while one model is served")
    vllm_xargs: JSONObject | None = Field(None, description="arguments of custom logits processors")
    response_format: JSONObject | None = Field(None, description="text, json_object, json_schema, structural_tag")
    structured_outputs: JSONObject | None = Field(
        None, description="one of json, regex, choice, grammar, json_object, structural_tag; or options alone"
    )
    guided_json: Any = Field(None, description="older name of structured_outputs.json")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = Field(None, description="SGLang's name of structured_outputs.regex")
    ebnf: str | None = Field(None, description="SGLang's name of structured_outputs.grammar")
    structural_tag: Any = Field(None, description="SGLang's name of structured_outputs.structural_tag")
    grammar: str | None = Field(None, description="llama.cpp's name of structured_outputs.grammar")
    json_schema: Any = Field(None, description="SGLang's and llama.cpp's name of structured_outputs.json")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    deadline_ms: int | None = Field(None, description="milliseconds that the client gives the whole request")
    session_id: str | None = Field(None, description="a name by which `DELETE /v1/sessions/{id}` gives up the session")
    session_final: bool | None = Field(None, description="whether the session is given up when this request ends")
    prompt_cache_key: str | None = Field(None, description="as `session_id`, where that is not given")
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class PoolingFields(RequestBody):
    """Fields of all pooling requests."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="a served name; may be left out while one model is served")
    truncate_prompt_tokens: int | None = Field(
        None, description="cut longer prompts to it; -1: to what the model takes"
    )
    truncation_side: str | None = Field(None, description="which end is cut: right or left")
    request_id: str | None = Field(None, description="what the answer's id ends in")
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None


RequestModel = TypeVar("RequestModel", bound=BaseModel)

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a decimal",
    "bool_type": "a boolean",
    "bool_parsing": "a boolean",
    "int_parsing": "an integer",
    "float_parsing": "a decimal",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse(model: type[RequestModel], body: JSONObject, *, is_text: bool = False) -> RequestModel:
    """The typed body.

    `is_text`: Its values are texts of a form, also of numbers and booleans.

    Raises:
        InvalidRequestError: The first field that is missing, of a wrong type or, where the model forbids it, unknown.
    """
    try:
        return model.model_validate(body, strict=False if is_text else None)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, InvalidRequestError):
            raise own from None
        raise _refusal(first["loc"], first["type"], body) from None


def _refusal(location: tuple[int | str, ...], kind: str, body: JSONObject) -> InvalidRequestError:
    name = str(location[-1])
    if kind == "missing":
        return missing_parameter(name)
    return unknown_parameter(name) if kind == "extra_forbidden" else _invalid_type(location, kind, body)


def _invalid_type(location: tuple[int | str, ...], kind: str, body: JSONObject) -> InvalidRequestError:
    """The error of one field; `location` may end in the name of a member of a union."""
    expected = _EXPECTED.get(kind, "another type")
    value: Any = body
    path = ""
    for step in location:
        if isinstance(value, dict) and step in value:
            value = value[step]
            path += f".{step}" if path else str(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
            path += f"[{step}]"
        else:
            expected = "a decimal"
    return request_errors.invalid_type(request_errors.echo(path), expected, value)


def unknown_fields(body: BaseModel) -> list[str]:
    """Names of the fields in the body that the model does not declare."""
    return list(body.model_extra or {})
