"""Renders errors: an exception becomes a status, headers and a body."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmstack_server.state.answer_source import OTHER_TEXT, OtherTextError
from llmstack_server.web.error_table import CLIENT_DEADLINE, ERRORS, INVALID_REQUEST
from llmstack_types import (
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    NoTokenAllowedError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    ServerOverloadedError,
    TenantLimitError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1024
ASLEEP = "The engine is asleep: POST /wake_up wakes it."


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error, ready to be sent: as a response, or as the last event of a stream."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON object of the error contract."""
        message = self.message[:MAX_MESSAGE_CHARS]
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The body as JSON bytes, at most 2 KiB: ASCII would escape an echoed character into six bytes."""
        return json.dumps(self.body(), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class HTTPError(Exception):
    """An error that only HTTP knows, carried to the renderer."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def error_answer(
    code: str | None, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> ErrorAnswer:
    """The answer of one entry of `ERRORS`; `headers` are those whose values vary."""
    kind = ERRORS[code]
    return ErrorAnswer(kind.status, kind.type, code, message, param, {**kind.headers, **(headers or {})})


def answer_to(error: BaseException, request_id: str) -> ErrorAnswer:
    """The answer to any error. An unforeseen one is logged under the request's id; its client learns nothing else."""
    if isinstance(error, HTTPError):
        return error.answer
    if isinstance(error, InvalidRequestError):
        # A plug-in may use codes of its own: they are answered as any invalid request is.
        kind = ERRORS.get(error.code)
        status, type_ = (400, INVALID_REQUEST) if kind is None else (kind.status, kind.type)
        return ErrorAnswer(status, type_, error.code, error.message, error.param)
    if isinstance(error, ServerOverloadedError):
        return server_is_overloaded()
    if isinstance(error, TenantLimitError):
        return rate_limit_exceeded(str(error), error.wait_s)
    if isinstance(error, EngineDeadError | OtherTextError):
        return engine_unavailable("The engine is gone." if isinstance(error, EngineDeadError) else OTHER_TEXT)
    if isinstance(error, NumericalError | NoTokenAllowedError):
        return numerical_error() if isinstance(error, NumericalError) else no_token_allowed(error)
    if isinstance(error, EngineLostError):
        return engine_unavailable("The engine had to be restarted, and this request cannot be resumed.")
    if isinstance(error, QuarantinedError):
        logger.error("request %s failed in the engine: %s", request_id, error)
        return request_quarantined(str(error) if str(error) in QuarantinedError.TEXTS else "it failed")
    if isinstance(error, RequestFailedError):
        logger.error("request %s failed in the engine: %s", request_id, error)
    else:
        logger.error("request %s: internal error", request_id, exc_info=error)
    return error_answer("internal_error", "Internal error")


def missing_api_key() -> ErrorAnswer:
    """401 `missing_api_key`, for a request without a usable header."""
    message = "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
    return error_answer("missing_api_key", message)


def operator_key_required() -> ErrorAnswer:
    """403 `operator_key_required`, for a key that may not control the server."""
    return error_answer("operator_key_required", "This route needs an operator's API key.")


def invalid_api_key() -> ErrorAnswer:
    """401 `invalid_api_key`; the key itself is not echoed."""
    return error_answer("invalid_api_key", "Incorrect API key provided.")


def unknown_url(method: str, path: str, advice: str = "") -> ErrorAnswer:
    """404 `unknown_url`, with at most 64 characters of the path, and a sentence on what would help."""
    message = f"Unknown request URL: {method[:16]} {_printable(path)}. {advice}"
    return error_answer("unknown_url", message.rstrip())


def method_not_supported(method: str, allow: str) -> ErrorAnswer:
    """405 `method_not_supported`; `allow` lists the methods of the path."""
    message = f"Method {method[:16]} is not supported here; use {allow}."
    return error_answer("method_not_supported", message, headers={"allow": allow})


def invalid_json(reason: str) -> ErrorAnswer:
    """400 without a code; `reason` is a sentence of ours without its full stop."""
    return error_answer(None, f"We could not parse the JSON body of your request: {reason}.")


def json_too_complex(things: str, maximum: int) -> ErrorAnswer:
    """400 `request_budget_exceeded`, for JSON that would delay other requests while it is decoded."""
    message = f"The JSON body of your request has more than {maximum} {things}. Please split it into several requests."
    return error_answer("request_budget_exceeded", message)


def body_not_an_object() -> ErrorAnswer:
    """400 `invalid_type`, for JSON other than an object."""
    return error_answer("invalid_type", "The body of the request must be a JSON object.")


def unsupported_media_type(reason: str) -> ErrorAnswer:
    """415 `unsupported_media_type`; `reason` is a sentence of ours without its full stop."""
    return error_answer("unsupported_media_type", f"Unsupported Media Type: {reason}.")


def request_too_large(max_bytes: int) -> ErrorAnswer:
    """413 `request_too_large`; the connection is closed with the body unread."""
    message = f"The body of the request is larger than the limit of {max_bytes} bytes."
    return error_answer("request_too_large", message)


def headers_too_large() -> ErrorAnswer:
    """431 `headers_too_large`, for the size and the number of headers and trailers."""
    return error_answer("headers_too_large", "The headers of the request are too large or too many.")


def invalid_host() -> ErrorAnswer:
    """400 `invalid_host`, for a request without a `Host` header or with several."""
    return error_answer("invalid_host", "The request needs exactly one 'Host' header.")


def unknown_host() -> ErrorAnswer:
    """400 `invalid_host`, for a name that may be that of a foreign page."""
    reason = "The name in the 'Host' header is not one of this machine. --allowed-hosts allows further names."
    return error_answer("invalid_host", reason)


def cross_site_request() -> ErrorAnswer:
    """403 `cross_site_request`, for a browser's request from a page of another origin."""
    reason = "A page of another origin may not send this request. --allowed-origins allows origins."
    return error_answer("cross_site_request", reason)


def invalid_http() -> ErrorAnswer:
    """400 `invalid_http`, for bytes that are no request of HTTP/1."""
    return error_answer("invalid_http", "The server could not read the request as HTTP/1.1.")


def expectation_failed() -> ErrorAnswer:
    """417 `expectation_failed`, for an unknown `Expect` header."""
    return error_answer("expectation_failed", "The server supports no expectation but '100-continue'.")


def request_timeout() -> ErrorAnswer:
    """408 `request_timeout`, for a request that arrives too slowly."""
    return error_answer("request_timeout", "The request was not received in time.")


def rate_limit_exceeded(reason: str, wait_s: float) -> ErrorAnswer:
    """429 `rate_limit_exceeded`; `wait_s` is when the same request would be accepted."""
    return error_answer("rate_limit_exceeded", reason, headers=_retry_after(wait_s))


def server_is_overloaded(retry_s: float | None = None) -> ErrorAnswer:
    """503 `server_is_overloaded`; `retry_s` is when there will be room, where that is known."""
    headers = {"retry-after": "1", "retry-after-ms": "500"} if retry_s is None else _retry_after(retry_s)
    message = "The server has too many requests waiting. Please retry later."
    return error_answer("server_is_overloaded", message, headers=headers)


def first_token_too_late(ttft_s: float, max_ttft_s: float, retry_s: float) -> ErrorAnswer:
    """503 `server_is_overloaded`, for a predicted first token beyond `--max-queue-wait`."""
    message = (
        f"The first token would come in {ttft_s:.1f} seconds, beyond the server's limit of {max_ttft_s:g} seconds."
    )
    return error_answer("server_is_overloaded", message, headers=_retry_after(retry_s))


def deadline_unreachable(wait_s: float, deadline_s: float, retry_s: float) -> ErrorAnswer:
    """503 `deadline_unreachable`, for a predicted wait beyond the client's deadline."""
    wait = f"{wait_s:.1f}" if wait_s >= 1 else f"{wait_s:.3f}"
    message = f"The predicted wait of {wait} seconds is beyond the request's deadline of {deadline_s:g} seconds."
    return error_answer("deadline_unreachable", message, headers=_retry_after(retry_s))


def _retry_after(wait_s: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}


def websocket_required(*, has_library: bool) -> ErrorAnswer:
    """426 `websocket_required`; `has_library`: Whether this server can open one."""
    message = "This route is opened as a WebSocket."
    if not has_library:
        message = "This server has no library for WebSockets: pip install 'llmstack-server[av]'."
    return error_answer("websocket_required", message)


def session_idle(limit_s: float) -> ErrorAnswer:
    """408 `session_idle`, the last event of a realtime session to which nothing is sent."""
    return error_answer("session_idle", f"The session ends: no message came for {limit_s:g} seconds.")


def server_shutting_down() -> ErrorAnswer:
    """503 `server_shutting_down`, for new requests during the drain."""
    return error_answer("server_shutting_down", "The server is shutting down.")


def engine_unavailable(reason: str) -> ErrorAnswer:
    """503 `engine_unavailable`, also while the model is being loaded."""
    return error_answer("engine_unavailable", reason)


def model_unavailable(reason: str, retry_s: float) -> ErrorAnswer:
    """503 `engine_unavailable`, for one of several models; `retry_s` is when it may be there."""
    return error_answer("engine_unavailable", reason, headers=_retry_after(retry_s))


def reload_failed(reason: str) -> ErrorAnswer:
    """409 `reload_failed`: nothing has changed."""
    return error_answer("reload_failed", f"Nothing has changed: {reason}")


def storage_unavailable(cause: str, what: str = "Responses") -> ErrorAnswer:
    """503 `storage_unavailable`, while the folder of `--state-dir` cannot be written; `cause` is one of ours."""
    advice = ", or send 'store': false" if what == "Responses" else ""
    return error_answer(
        "storage_unavailable", f"{what} cannot be stored at the moment: {cause}. Please retry later{advice}."
    )


def idempotency_key_reused() -> ErrorAnswer:
    """400 `idempotency_key_reused`: clients retry 409."""
    message = "This 'Idempotency-Key' was used for another request: another route or another body."
    return error_answer("idempotency_key_reused", message, "Idempotency-Key")


def stream_reader_replaced() -> ErrorAnswer:
    """409 `stream_reader_replaced`, for the earlier reader of a stream."""
    return error_answer("stream_reader_replaced", "Another connection reads this stream now.")


def request_not_found() -> ErrorAnswer:
    """404 `not_found`, for a request that is unknown, forgotten, or another key's: all look alike."""
    return error_answer(
        "not_found",
        "The last steps have no request with this id, which is the 'id' of an answer or its 'x-request-id'.",
    )


def session_not_found() -> ErrorAnswer:
    """404 `not_found`, for a session that is unknown, forgotten, or another key's: all look alike."""
    return error_answer("not_found", "No session of this key that is known has this name.")


def step_log_not_kept() -> ErrorAnswer:
    """404 `not_found`, for a step log that goes to a file, or is switched off."""
    return error_answer("not_found", "The server keeps no step log in memory (--record-steps, --step-log-bytes).")


def stream_not_found() -> ErrorAnswer:
    """404 `not_found`, for a stream that was never there, has ended, or is another key's, and an event beyond its end.

    All look alike.
    """
    return error_answer("not_found", "There is no stream with this id that goes on after this event.")


def stream_away() -> ErrorAnswer:
    """503 `engine_unavailable`, while the API process that has a stream is being replaced."""
    return engine_unavailable("The API process that has this answer does not reply now. Try again.")


def deadline_exceeded(limit_s: float) -> ErrorAnswer:
    """504 `deadline_exceeded`; `limit_s` is the server's own limit."""
    return error_answer("deadline_exceeded", f"The request was not done after {limit_s:g} seconds.")


def client_deadline_exceeded(limit_s: float) -> ErrorAnswer:
    """408 `deadline_exceeded`; `limit_s` is what the client gave the request."""
    message = f"The request was not done within its deadline of {limit_s:g} seconds."
    kind = CLIENT_DEADLINE
    return ErrorAnswer(kind.status, kind.type, kind.code, message, headers=kind.headers)


def no_token_allowed(error: NoTokenAllowedError) -> ErrorAnswer:
    """400 `invalid_value`, also after tokens: fields such as `bad_words` and a constraint exclude each other."""
    return error_answer("invalid_value", f"Invalid value: {error}.")


def numerical_error() -> ErrorAnswer:
    """500 `numerical_error`, which a retry would only repeat."""
    return error_answer("numerical_error", "The model gave no usable probabilities for the next token.")


def request_quarantined(reason: str) -> ErrorAnswer:
    """500 `request_quarantined`; `reason` is one of the fixed texts of `QuarantinedError`."""
    return error_answer("request_quarantined", f"{reason.capitalize()}.")


def missing_parameter(param: str, message: str | None = None) -> InvalidRequestError:
    """Code `missing_required_parameter`; `message` replaces the usual sentence."""
    text = message or f"Missing required parameter: '{param}'."
    return InvalidRequestError(text, param=param, code="missing_required_parameter")


def model_not_found(model: str, served: str) -> InvalidRequestError:
    """Code `model_not_found`, which is answered with 404; `served` lists the models."""
    message = f"The model `{_printable(model)}` does not exist. Available models: {served}."
    return InvalidRequestError(message, param="model", code="model_not_found")


def unknown_parameter(param: str) -> InvalidRequestError:
    """Code `unknown_parameter`, with `--strict-params` and on control routes only."""
    shown = _printable(param)
    return InvalidRequestError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")


def _printable(text: str) -> str:
    """At most 64 characters of the input, as a message may echo them."""
    return "".join(char if char.isprintable() else "?" for char in text[:64])
