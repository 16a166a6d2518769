"""Sampling fields of Ollama's requests."""

from __future__ import annotations

from llmstack_llm import GivenSampling, request_errors
from llmstack_server.apis.ollama.names import Fields
from llmstack_server.apis.ollama.protocol import IGNORED_OPTIONS, OPTIONS, AnswerRequest, OptionFields
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.unsupported import check_unsupported
from llmstack_types import InvalidRequestError, RequestOutputKind, StructuredOutputsParams

# Options with the meaning of a sampling field, and its name.
_NAMES = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "seed": "seed", "stop": "stop", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty", "num_predict": "max_tokens",
}  # fmt: skip
_LOGPROBS_NAME = {"logprobs": "top_logprobs"}
_FORM_NAMES = {"structured_outputs": "format", "structured_outputs.json": "format"}
_WHOLE_TEXT = -1


def given_sampling(state: ServerState, fields: AnswerRequest) -> GivenSampling:
    """The sampling fields of a request, unchecked, and its names of them.

    Raises:
        InvalidRequestError: An option is not available, or `format` is neither `json` nor a schema.
    """
    is_stream = fields.stream is not False
    given: Fields = {"output_kind": RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY}
    if fields.options is not None:
        given |= _given_options(state, fields.options)
    names = {own: f"options.{option}" for option, own in _NAMES.items()} | _LOGPROBS_NAME
    if fields.logprobs:
        given["logprobs"] = fields.top_logprobs or 0
    constraint = _constraint(fields.format)
    if constraint is not None:
        given["structured_outputs"] = constraint
        names |= _FORM_NAMES
    return GivenSampling(given, names)


def _given_options(state: ServerState, options: OptionFields) -> Fields:
    extra = options.model_extra or {}
    try:
        check_unsupported(extra, OPTIONS)
    except InvalidRequestError as error:
        name = f"options.{error.param}"
        message = error.message.replace(f"'{error.param}'", f"'{name}'")
        raise InvalidRequestError(message, param=name, code=error.code) from None
    state.metrics.unknown_parameters.inc(sum(name not in OPTIONS and name not in IGNORED_OPTIONS for name in extra))
    if options.repeat_penalty not in (None, 1) and options.repeat_last_n != _WHOLE_TEXT:
        reason = "the penalty counts the whole text here, so it needs 'repeat_last_n': -1"
        raise request_errors.unsupported_value("options.repeat_penalty", reason)
    given = {own: getattr(options, option) for option, own in _NAMES.items() if getattr(options, option) is not None}
    if given.get("max_tokens", 0) < 0:  # all that fit
        del given["max_tokens"]
    return given


def _constraint(value: object) -> StructuredOutputsParams | None:
    """`format` as a constraint; None for free text."""
    if value is None or value == "":
        return None
    if value == "json":
        return StructuredOutputsParams(json_object=True)
    if not isinstance(value, dict):
        raise request_errors.invalid_value("format", "expected 'json' or a JSON schema")
    return StructuredOutputsParams(json=value)
