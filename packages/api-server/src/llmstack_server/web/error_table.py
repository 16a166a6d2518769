"""The errors of the HTTP API: status, type, code, cause and headers of each.

Every fault is answered with an entry of `ERRORS`. `tools/make_errors_page.py` writes docs/errors.md from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"
SERVER_ERROR = "server_error"

# A transient refusal says when to retry. The official clients retry every 5xx, so a deterministic one forbids it.
_RETRY = {"retry-after": "1", "retry-after-ms": "500"}
_DO_NOT_RETRY = {"x-should-retry": "false"}
_CLOSE = {"connection": "close"}
_PART = "the part, such as `messages[0].content[1]`"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One error of the API.

    Attributes:
        code: Machine-readable cause; None for a body that is not JSON, as at OpenAI.
        cause: When it is answered, as a phrase for the documentation.
        param: The meaning of the answer's `param`, as a phrase for the documentation; None where it is null.
        headers: Headers of every such answer.
        varying_headers: Names of headers whose values depend on the request.
    """

    code: str | None
    status: int
    type: str
    cause: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    varying_headers: tuple[str, ...] = ()


def _invalid(code: str | None, cause: str, param: str | None = "the field", status: int = 400) -> ErrorKind:
    return ErrorKind(code, status, INVALID_REQUEST, cause, param)


CLIENT_DEADLINE = ErrorKind(
    "deadline_exceeded",
    408,
    SERVER_ERROR,
    "the deadline of `x-llmstack-deadline-ms` or `deadline_ms` has passed",
    headers=_DO_NOT_RETRY,
)

# In the order of the checks: authentication, path and method, limits, headers, body, fields, capacity, generation.
KINDS = (
    ErrorKind(
        "missing_api_key",
        401,
        INVALID_REQUEST,
        "no `Authorization` or `x-api-key` header, or a malformed one",
        headers={"www-authenticate": "Bearer"},
    ),
    ErrorKind("invalid_api_key", 401, INVALID_REQUEST, "a wrong key", headers={"www-authenticate": "Bearer"}),
    _invalid(
        "operator_key_required", "a control route with a key that is no operator's, where there are several", None, 403
    ),
    _invalid(
        "cross_site_request", "a browser's request from a page of another origin, on a server without keys", None, 403
    ),
    _invalid("unknown_url", "an unknown path; the message names the option that would open it", None, 404),
    ErrorKind(
        "method_not_supported", 405, INVALID_REQUEST, "a method that the path does not have", varying_headers=("allow",)
    ),
    ErrorKind(
        "websocket_required",
        426,
        INVALID_REQUEST,
        "a request to `/v1/realtime` that opens no WebSocket, or a server without the library for one",
        headers={"upgrade": "websocket", "connection": "upgrade"},
    ),
    ErrorKind("server_shutting_down", 503, UNAVAILABLE, "the server is shutting down", headers={**_RETRY, **_CLOSE}),
    ErrorKind(
        "engine_unavailable",
        503,
        UNAVAILABLE,
        "the model loads, sleeps or cannot be loaded, the engine lost this request, or an API process does not reply",
        headers=_RETRY,
    ),
    ErrorKind(
        "rate_limit_exceeded",
        429,
        RATE_LIMIT,
        "a limit of the API key: requests per minute, requests at one time, loads of models, or time for constraints",
        varying_headers=("retry-after", "retry-after-ms"),
    ),
    ErrorKind(
        "headers_too_large",
        431,
        INVALID_REQUEST,
        "headers, or trailers of a chunked body, over the limit of size or number",
        headers=_CLOSE,
    ),
    ErrorKind("invalid_http", 400, INVALID_REQUEST, "bytes that are no request of HTTP/1", headers=_CLOSE),
    ErrorKind(
        "invalid_host",
        400,
        INVALID_REQUEST,
        "no `Host` header, or several; without keys on a loopback address, a name that is not this machine's",
        headers=_CLOSE,
    ),
    ErrorKind(
        "expectation_failed", 417, INVALID_REQUEST, "an `Expect` header other than `100-continue`", headers=_CLOSE
    ),
    ErrorKind("request_timeout", 408, INVALID_REQUEST, "the request was not received in time", headers=_CLOSE),
    _invalid("unsupported_media_type", "a content type other than JSON in UTF-8, or a content encoding", None, 415),
    ErrorKind("request_too_large", 413, INVALID_REQUEST, "a body over the limit (default 4 MiB)", headers=_CLOSE),
    _invalid(None, "not JSON: a syntax error, invalid UTF-8, NaN, duplicate keys, more than 64 levels", None),
    _invalid("missing_required_parameter", "a required field is missing"),
    _invalid("invalid_type", "a value of the wrong type, or a body that is no object", "the field; null for the body"),
    _invalid("unknown_parameter", "an unknown field, with `--strict-params` or of a control route"),
    _invalid("unsupported_parameter", "a known field that this server does not support"),
    _invalid("unsupported_value", "a value that this model or server does not support"),
    _invalid("model_not_found", "an unknown model", "`model`", 404),
    _invalid(
        "not_found",
        "the id of a response, item, file, batch or stream that is unknown, or that belongs to another API key",
        "`response_id`, `previous_response_id`, `input_file_id` or the reference; null for an id of the path",
        404,
    ),
    _invalid("file_quota_exceeded", "the files or batches of an API key are at their limit", None),
    _invalid("invalid_value", "a value that is not permitted, alone or together with another field"),
    _invalid("integer_above_max_value", "an integer above its maximum"),
    _invalid("integer_below_min_value", "an integer below its minimum"),
    _invalid("decimal_above_max_value", "a number above its maximum"),
    _invalid("decimal_below_min_value", "a number below its minimum"),
    _invalid("empty_array", "an empty array"),
    _invalid("array_above_max_length", "an array with too many entries"),
    _invalid("string_below_min_length", "an empty string"),
    _invalid("string_above_max_length", "a string that is too long"),
    _invalid("object_above_max_properties", "an object with too many entries"),
    _invalid("invalid_json_schema", "a JSON schema that is malformed or uses an unsupported keyword"),
    _invalid("schema_too_complex", "a JSON schema over a limit, or one that takes too long to compile"),
    _invalid("invalid_regex", "a regular expression that is malformed or uses something unsupported"),
    _invalid("invalid_grammar", "a grammar that is malformed or uses something unsupported"),
    _invalid("grammar_too_complex", "a grammar or pattern over a limit, or one that takes too long to compile"),
    _invalid("invalid_image", "an image that is damaged, too long and narrow, or not valid base64", _PART),
    _invalid("too_many_images", "more images, videos or sounds than a prompt may have", _PART),
    _invalid(
        "image_too_large",
        "images with too many pixels or bytes, alone or together, and one that takes too long to read",
        _PART,
    ),
    _invalid("unsupported_media_format", "an image of a format other than the allowed ones", _PART),
    _invalid("media_url_not_allowed", "a URL that this server does not fetch", _PART),
    _invalid("media_fetch_failed", "a URL whose server fails, or answers with something else", _PART),
    _invalid("invalid_audio", "sound that cannot be used", _PART),
    _invalid("audio_required", "a prompt without sound, for a model that transcribes", "the prompt"),
    _invalid("audio_too_long", "sound that is longer than allowed", _PART),
    _invalid("audio_too_short", "sound of less than a tenth of a second", _PART),
    _invalid("session_idle", "a realtime session in which no message came for `--realtime-idle-timeout`", None, 408),
    _invalid("media_not_found", "a `uuid` without content that is not known, or not any more", _PART),
    _invalid(
        "request_budget_exceeded",
        "too many prompts, completions, characters or numbers in one request, or too many JSON values in its body",
        "the field; null for the body",
    ),
    _invalid("context_length_exceeded", "prompt and `max_tokens` exceed the context, or never fit into the KV cache"),
    ErrorKind(
        "idempotency_key_reused",
        400,
        INVALID_REQUEST,
        "an `Idempotency-Key` that the same API key has used for another route or body",
        "`Idempotency-Key`",
        headers=_DO_NOT_RETRY,
    ),
    ErrorKind(
        "stream_reader_replaced",
        409,
        INVALID_REQUEST,
        "another connection reads this stream now; the last event of the one before",
        headers=_DO_NOT_RETRY,
    ),
    _invalid("duplicate_request_id", "a `request_id` that the same API key is using in a running request"),
    ErrorKind(
        "server_is_overloaded",
        503,
        UNAVAILABLE,
        "too many requests or tokens are waiting, or the predicted first token is beyond `--max-queue-wait`",
        varying_headers=("retry-after", "retry-after-ms"),
    ),
    ErrorKind(
        "deadline_unreachable",
        503,
        UNAVAILABLE,
        "the predicted wait is beyond the deadline of `x-llmstack-deadline-ms` or `deadline_ms`",
        varying_headers=("retry-after", "retry-after-ms"),
    ),
    ErrorKind(
        "reload_failed",
        409,
        INVALID_REQUEST,
        "`/v1/reload` and `/update_weights` cannot load what was named, or not now; the weights of before serve on",
        headers=_DO_NOT_RETRY,
    ),
    ErrorKind(
        "storage_unavailable",
        503,
        UNAVAILABLE,
        "the disk of `--state-dir` is full, or its folder is not there or cannot be written; the message says which",
        headers=_RETRY,
    ),
    ErrorKind("deadline_exceeded", 504, SERVER_ERROR, "`--request-timeout` has passed"),
    CLIENT_DEADLINE,
    ErrorKind(
        "request_quarantined",
        500,
        SERVER_ERROR,
        "the request makes the engine fail, while others continue",
        headers=_DO_NOT_RETRY,
    ),
    ErrorKind(
        "numerical_error", 500, SERVER_ERROR, "the model computed no usable probabilities", headers=_DO_NOT_RETRY
    ),
    ErrorKind(
        "internal_error",
        500,
        SERVER_ERROR,
        "any other fault; the log has it under the request id",
        headers=_DO_NOT_RETRY,
    ),
)

ERRORS: Mapping[str | None, ErrorKind] = {kind.code: kind for kind in KINDS if kind is not CLIENT_DEADLINE}
