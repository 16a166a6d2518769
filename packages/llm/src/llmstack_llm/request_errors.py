"""Error sentences of refused requests, one function per code."""

from __future__ import annotations

from llmstack_types import (
    EngineLostError,
    InvalidRequestError,
    NoTokenAllowedError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
)

MAX_ECHOED_CHARS = 64
_MAX_ECHOED_BITS = 200  # 61 decimal digits; Python refuses to print integers of thousands of digits at all

_TYPE_NAMES = {
    bool: "a boolean", int: "an integer", float: "a decimal", str: "a string", list: "an array", tuple: "an array",
    dict: "an object", type(None): "null",
}  # fmt: skip


def echo(value: object) -> str:
    """A piece of the input as it may appear in a message: at most 64 characters, no line breaks."""
    if isinstance(value, int) and value.bit_length() > _MAX_ECHOED_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        text = value[:MAX_ECHOED_CHARS].encode("utf-8", "replace").decode()
    elif isinstance(value, int | float):
        text = str(value)
    else:
        text = type_name(value)
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ECHOED_CHARS])


def type_name(value: object) -> str:
    """The type of the value in the words of JSON; Python's name of other types."""
    return _TYPE_NAMES.get(type(value)) or f"a value of type {type(value).__name__}"


def invalid_type(param: str, expected: str, value: object) -> InvalidRequestError:
    """Code `invalid_type`; `expected` with its article, such as `an integer`."""
    message = f"Invalid type for '{param}': expected {expected}, but got {type_name(value)} instead."
    return InvalidRequestError(message, param=param, code="invalid_type")


def above_max(param: str, maximum: float, value: float, *, is_integer: bool, note: str = "") -> InvalidRequestError:
    """Code `integer_above_max_value` or `decimal_above_max_value`."""
    kind = "integer" if is_integer else "decimal"
    bound = str(maximum) if is_integer else f"{maximum:g}"
    message = (
        f"Invalid '{param}': {kind} above maximum value. Expected a value <= {bound}, but got {echo(value)} instead."
    )
    return InvalidRequestError(message + note, param=param, code=f"{kind}_above_max_value")


def below_min(
    param: str, minimum: float, value: float, *, is_integer: bool, is_exclusive: bool = False, note: str = ""
) -> InvalidRequestError:
    """Code `integer_below_min_value` or `decimal_below_min_value`."""
    kind = "integer" if is_integer else "decimal"
    bound = str(minimum) if is_integer else f"{minimum:g}"
    relation = ">" if is_exclusive else ">="
    message = (
        f"Invalid '{param}': {kind} below minimum value. "
        f"Expected a value {relation} {bound}, but got {echo(value)} instead."
    )
    return InvalidRequestError(message + note, param=param, code=f"{kind}_below_min_value")


def invalid_value(param: str, reason: str) -> InvalidRequestError:
    """Code `invalid_value`; `reason` is a sentence of ours without its full stop."""
    return InvalidRequestError(f"Invalid '{param}': {reason}.", param=param, code="invalid_value")


def missing_parameter(param: str) -> InvalidRequestError:
    """Code `missing_required_parameter`: a field has to be given."""
    message = f"Missing required parameter: '{param}'."
    return InvalidRequestError(message, param=param, code="missing_required_parameter")


def media_not_cut() -> InvalidRequestError:
    """Code `unsupported_value`, of a prompt with pictures that is to be cut."""
    return unsupported_value("truncate_prompt_tokens", "a prompt with pictures is not cut")


def unsupported_value(param: str, reason: str) -> InvalidRequestError:
    """Code `unsupported_value`: fine elsewhere, not with this model."""
    return InvalidRequestError(f"Unsupported value: {reason}.", param=param, code="unsupported_value")


def audio_required(param: str) -> InvalidRequestError:
    """A prompt without sound, for a model that transcribes."""
    message = "This model transcribes speech: its prompts need audio, which /v1/audio/transcriptions takes."
    return InvalidRequestError(message, param=param, code="audio_required")


def generation_not_supported() -> InvalidRequestError:
    """Code `unsupported_value`, about the model: it has no output head. The words are those that clients look for."""
    message = (
        "The model does not support Completions API or Chat Completions API: it only computes embeddings or labels. "
        "Please use /v1/embeddings, /score or /classify."
    )
    return InvalidRequestError(message, param="model", code="unsupported_value")


def pooling_not_supported(api: str, reason: str) -> InvalidRequestError:
    """Code `unsupported_value`, about the model; `reason` is a sentence of ours without its full stop."""
    return InvalidRequestError(
        f"The model does not support {api} API: {reason}.", param="model", code="unsupported_value"
    )


def unsupported_parameter(param: str, reason: str) -> InvalidRequestError:
    """Refusal with the code `unsupported_parameter`."""
    return InvalidRequestError(f"Unsupported parameter: {reason}.", param=param, code="unsupported_parameter")


def array_too_long(param: str, maximum: int, length: int) -> InvalidRequestError:
    """Refusal with the code `array_above_max_length`."""
    message = (
        f"Invalid '{param}': array too long. Expected an array with maximum length {maximum}, "
        f"but got an array with length {length} instead."
    )
    return InvalidRequestError(message, param=param, code="array_above_max_length")


def empty_array(param: str) -> InvalidRequestError:
    """Refusal with the code `empty_array`."""
    message = (
        f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    )
    return InvalidRequestError(message, param=param, code="empty_array")


def empty_string(param: str) -> InvalidRequestError:
    """Refusal with the code `string_below_min_length`."""
    message = (
        f"Invalid '{param}': string too short. Expected a string with minimum length 1, "
        f"but got an empty string instead."
    )
    return InvalidRequestError(message, param=param, code="string_below_min_length")


def string_too_long(param: str, maximum: int, length: int) -> InvalidRequestError:
    """Refusal with the code `string_above_max_length`."""
    message = (
        f"Invalid '{param}': string too long. Expected a string with maximum length {maximum}, "
        f"but got a string with length {length} instead."
    )
    return InvalidRequestError(message, param=param, code="string_above_max_length")


def too_many_properties(param: str, maximum: int, count: int) -> InvalidRequestError:
    """Refusal with the code `object_above_max_properties`."""
    message = (
        f"Invalid '{param}': too many properties. Expected an object with at most {maximum} properties, "
        f"but got an object with {count} properties instead."
    )
    return InvalidRequestError(message, param=param, code="object_above_max_properties")


def out_of_vocabulary(param: str, token_id: int, vocab_size: int) -> InvalidRequestError:
    """Code `invalid_value`: a token id that the model has no logit for."""
    return invalid_value(param, f"token id {echo(token_id)} is out of vocabulary, expected 0 <= id < {vocab_size}")


def context_length_exceeded(
    param: str, max_model_len: int, num_prompt_tokens: int | None, max_tokens: int | None = None
) -> InvalidRequestError:
    """Code `context_length_exceeded`; `num_prompt_tokens` None means a text too long to tokenize."""
    part = "messages" if param.startswith("messages") else "prompt"
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if num_prompt_tokens is None:
        verb = "are" if part == "messages" else "is"
        text = f"your {part} {verb} too long to be tokenized. Please reduce the length of the {part}."
    elif max_tokens is None:
        full = ", which leaves no room for a completion" if num_prompt_tokens == max_model_len else ""
        text = f"your {part} resulted in {num_prompt_tokens} tokens{full}. Please reduce the length of the {part}."
    else:
        text = (
            f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the {part}, "
            f"{max_tokens} in the completion). Please reduce the length of the {part} or completion."
        )
    return InvalidRequestError(limit + text, param=param, code="context_length_exceeded")


def media_too_long(param: str, max_model_len: int, num_tokens: int) -> InvalidRequestError:
    """Code `context_length_exceeded`: the pictures and the like up to this one have more tokens than the context."""
    text = (
        f"This model's maximum context length is {max_model_len} tokens. However, the media of this prompt have "
        f"{num_tokens} tokens or more. Please send fewer or smaller ones."
    )
    return InvalidRequestError(text, param=param, code="context_length_exceeded")


def max_tokens_too_large(param: str, max_tokens: int, max_model_len: int) -> InvalidRequestError:
    """Code `invalid_value`: more output than the model can ever hold."""
    message = (
        f"max_tokens is too large: {echo(max_tokens)}. This model supports at most {max_model_len} completion tokens, "
        f"whereas you provided {echo(max_tokens)}."
    )
    return InvalidRequestError(message, param=param, code="invalid_value")


def answer_too_large(param: str, maximum: int, count: int) -> InvalidRequestError:
    """Code `request_budget_exceeded`, about the size of the answer."""
    message = (
        f"This request asks for {count} numbers; at most {maximum} are allowed in one answer. "
        "Please send fewer or shorter inputs."
    )
    return InvalidRequestError(message, param=param, code="request_budget_exceeded")


def too_much_text(param: str, maximum: int, count: int) -> InvalidRequestError:
    """Code `request_budget_exceeded`, about the texts of all prompts together."""
    message = (
        f"The prompts of this request have {count} characters; at most {maximum} are allowed. "
        "Please send fewer or shorter texts."
    )
    return InvalidRequestError(message, param=param, code="request_budget_exceeded")


def request_budget_exceeded(param: str, num_prompts: int, n: int, maximum: int) -> InvalidRequestError:
    """Refusal with the code `request_budget_exceeded`."""
    message = (
        f"This request asks for {num_prompts} x {n} completions; "
        f"at most {maximum} are allowed in one request. Please send fewer prompts or a lower 'n'."
    )
    return InvalidRequestError(message, param=param, code="request_budget_exceeded")


def queue_too_short(param: str, count: int, maximum: int) -> InvalidRequestError:
    """Code `request_budget_exceeded`, about the queue: no wait would help."""
    advice = "fewer prompts or a lower 'n'" if param == "n" else "fewer prompts"
    message = (
        f"This request asks for {count} answers; this server works on at most {maximum} at one time "
        f"(--max-num-queued-reqs). Please send {advice}."
    )
    return InvalidRequestError(message, param=param, code="request_budget_exceeded")


def failure_of(error: str | None) -> RequestFailedError:
    """The typed error where the text is one of those that are agreed upon; `error` is `EngineCoreOutput.error`."""
    text = error or ""
    if text in QuarantinedError.TEXTS:
        return QuarantinedError(text)
    kinds = {kind.TEXT: kind for kind in (NumericalError, NoTokenAllowedError, EngineLostError)}
    return kinds.get(text, RequestFailedError)(text)
