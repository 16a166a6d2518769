"""Errors in Anthropic's form."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.errors import ERROR_EVENT, MAX_MESSAGE_CHARS, ErrorAnswer, answer_to
from llmstack_server.web.keep_alive import PART_WRITER
from llmstack_server.web.middleware import MarkingSender, route_path, send_error
from llmstack_server.web.sse import frame_named

PATH = "/v1/messages"
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


def error_event(answer: ErrorAnswer, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return frame_named(in_anthropic_form(answer, request_id).body())


class AnthropicErrorMiddleware:
    """Renders all errors of Anthropic's routes, also those of inner middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{route_path(scope)}/".startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        request_id = scope["state"]["request_id"]
        scope["state"][ERROR_EVENT] = lambda answer, _: error_event(answer, request_id)
        sender = MarkingSender(send, "request-id", request_id, getattr(send, PART_WRITER, None))
        try:
            await self._app(scope, receive, sender)
        except ClientDisconnected:
            raise
        except Exception as error:  # any error has Anthropic's form on these routes
            if sender.has_started:
                raise
            answer = in_anthropic_form(answer_to(error, request_id), request_id)
            await send_error(answer, receive, sender)
