"""Errors in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmstack_server.web.error_forms import ErrorForm
from llmstack_server.web.errors import MAX_MESSAGE_CHARS, ErrorAnswer
from llmstack_server.web.sse import frame_named

OVERLOADED_STATUS = 529

_STATUS_TO_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class AnthropicErrorAnswer(ErrorAnswer):
    """One error in Anthropic's form."""

    request_id: str = ""

    def body(self) -> dict[str, object]:
        """The JSON object of the API; the message names the invalid field."""
        error = {"type": self.type, "message": self.message[:MAX_MESSAGE_CHARS]}
        return {"type": "error", "error": error, "request_id": self.request_id}


def in_anthropic_form(answer: ErrorAnswer, request_id: str) -> AnthropicErrorAnswer:
    """The error in Anthropic's form, where an overloaded server has the status 529."""
    status = OVERLOADED_STATUS if answer.code == "server_is_overloaded" else answer.status
    kind = _STATUS_TO_TYPE.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = answer.message
    if answer.param is not None and answer.param not in message:
        message = f"{answer.param}: {message}"
    return AnthropicErrorAnswer(status, kind, answer.code, message, answer.param, answer.headers, request_id)


class AnthropicErrors(ErrorForm):
    """The form of the Messages API."""

    schema: Mapping[str, object] = MappingProxyType({
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    })  # fmt: skip
    id_headers = ("request-id",)
    statuses = (OVERLOADED_STATUS,)

    def answer(self, answer: ErrorAnswer, request_id: str) -> ErrorAnswer:
        """The error with a type of Anthropic's."""
        return in_anthropic_form(answer, request_id)

    def last_event(self, answer: ErrorAnswer, request_id: str, num_events: int) -> bytes:
        """The event `error`, which is not numbered."""
        return frame_named(in_anthropic_form(answer, request_id).body())


ANTHROPIC_ERRORS = AnthropicErrors()
