"""The one place where an error becomes a status, headers and a body."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmstack_types import (
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    ServerOverloadedError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1024
INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"
SERVER_ERROR = "server_error"

# What a client may send again soon, and what it must not: the official clients retry every 5xx unless told.
_RETRY = {"retry-after": "1", "retry-after-ms": "500"}
_DO_NOT_RETRY = {"x-should-retry": "false"}
_CLOSE = {"connection": "close"}


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


def answer_to(error: BaseException, request_id: str) -> ErrorAnswer:
    """The answer to any error; what nobody foresaw is logged with the request's id and tells its user nothing else."""
    if isinstance(error, HTTPError):
        return error.answer
    if isinstance(error, InvalidRequestError):
        status = 404 if error.code == "model_not_found" else 400
        return ErrorAnswer(status, INVALID_REQUEST, error.code, error.message, error.param)
    if isinstance(error, ServerOverloadedError):
        message = "The server has too many requests waiting. Please retry later."
        return ErrorAnswer(503, UNAVAILABLE, "server_is_overloaded", message, headers=_RETRY)
    if isinstance(error, EngineDeadError):
        return engine_unavailable("The engine is gone.")
    if isinstance(error, NumericalError):
        return numerical_error()
    if isinstance(error, EngineLostError):
        return engine_unavailable("The engine had to be restarted, and this request cannot be resumed.")
    if isinstance(error, QuarantinedError):
        logger.error("request %s failed in the engine: %s", request_id, error)
        return request_quarantined(str(error) if str(error) in QuarantinedError.TEXTS else "it failed")
    if isinstance(error, RequestFailedError):
        logger.error("request %s failed in the engine: %s", request_id, error)
    else:
        logger.error("request %s: internal error", request_id, exc_info=error)
    return ErrorAnswer(500, SERVER_ERROR, "internal_error", "Internal error", headers=_DO_NOT_RETRY)


def missing_api_key() -> ErrorAnswer:
    """Row 1 of the contract."""
    message = "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
    return ErrorAnswer(401, INVALID_REQUEST, "missing_api_key", message, headers={"www-authenticate": "Bearer"})


def invalid_api_key() -> ErrorAnswer:
    """Row 2; the key itself is not echoed."""
    message = "Incorrect API key provided."
    return ErrorAnswer(401, INVALID_REQUEST, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def unknown_url(method: str, path: str) -> ErrorAnswer:
    """Row 3."""
    shown = "".join(char if char.isprintable() else "?" for char in path[:64])
    return ErrorAnswer(404, INVALID_REQUEST, "unknown_url", f"Unknown request URL: {method[:16]} {shown}.")


def method_not_supported(method: str, allow: str) -> ErrorAnswer:
    """Row 4."""
    message = f"Method {method[:16]} is not supported here; use {allow}."
    return ErrorAnswer(405, INVALID_REQUEST, "method_not_supported", message, headers={"allow": allow})


def invalid_json(reason: str) -> ErrorAnswer:
    """Row 5; `reason` is a sentence of ours without its full stop."""
    return ErrorAnswer(400, INVALID_REQUEST, None, f"We could not parse the JSON body of your request: {reason}.")


def body_not_an_object() -> ErrorAnswer:
    """Row 6."""
    return ErrorAnswer(400, INVALID_REQUEST, "invalid_type", "The body of the request must be a JSON object.")


def unsupported_media_type(reason: str) -> ErrorAnswer:
    """Row 7."""
    return ErrorAnswer(415, INVALID_REQUEST, "unsupported_media_type", f"Unsupported Media Type: {reason}.")


def request_too_large(max_bytes: int) -> ErrorAnswer:
    """Row 8."""
    message = f"The body of the request is larger than the limit of {max_bytes} bytes."
    return ErrorAnswer(413, INVALID_REQUEST, "request_too_large", message, headers=_CLOSE)


def headers_too_large() -> ErrorAnswer:
    """Row 9."""
    message = "The headers of the request are too large or too many."
    return ErrorAnswer(431, INVALID_REQUEST, "headers_too_large", message, headers=_CLOSE)


def request_timeout() -> ErrorAnswer:
    """Row 10."""
    message = "The request was not received in time."
    return ErrorAnswer(408, INVALID_REQUEST, "request_timeout", message, headers=_CLOSE)


def rate_limit_exceeded(reason: str, wait_s: float) -> ErrorAnswer:
    """Row 39; `wait_s` is when the same request would pass."""
    headers = {"retry-after": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(wait_s * 1000)))}
    return ErrorAnswer(429, RATE_LIMIT, "rate_limit_exceeded", reason, headers=headers)


def server_shutting_down() -> ErrorAnswer:
    """Row 41."""
    message = "The server is shutting down."
    return ErrorAnswer(503, UNAVAILABLE, "server_shutting_down", message, headers={**_RETRY, **_CLOSE})


def engine_unavailable(reason: str) -> ErrorAnswer:
    """Row 42, also while the model is being loaded."""
    return ErrorAnswer(503, UNAVAILABLE, "engine_unavailable", reason, headers=_RETRY)


def deadline_exceeded(limit_s: float) -> ErrorAnswer:
    """Row 43."""
    message = f"The request was not done after {limit_s:g} seconds."
    return ErrorAnswer(504, SERVER_ERROR, "deadline_exceeded", message)


def numerical_error() -> ErrorAnswer:
    """Row 44."""
    message = "The model gave no usable probabilities for the next token."
    return ErrorAnswer(500, SERVER_ERROR, "numerical_error", message, headers=_DO_NOT_RETRY)


def request_quarantined(reason: str) -> ErrorAnswer:
    """Row 44; `reason` is one of the fixed texts of `QuarantinedError`."""
    return ErrorAnswer(500, SERVER_ERROR, "request_quarantined", f"{reason.capitalize()}.", headers=_DO_NOT_RETRY)


def missing_parameter(param: str, message: str | None = None) -> InvalidRequestError:
    """Rows 11 and 13."""
    text = message or f"Missing required parameter: '{param}'."
    return InvalidRequestError(text, param=param, code="missing_required_parameter")


def model_not_found(model: str, served: str) -> InvalidRequestError:
    """Row 12."""
    shown = "".join(char if char.isprintable() else "?" for char in model[:64])
    message = f"The model `{shown}` does not exist. Available models: {served}."
    return InvalidRequestError(message, param="model", code="model_not_found")


def unknown_parameter(param: str) -> InvalidRequestError:
    """Row 34 under `--strict-params`."""
    shown = "".join(char if char.isprintable() else "?" for char in param[:64])
    return InvalidRequestError(f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
