"""The forms in which the APIs of a server say the same errors."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.sse import encode_json, frame

ERROR_SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class ErrorForm:
    """The form of OpenAI's API. Other APIs derive theirs from it.

    Attributes:
        schema: The JSON schema of an error.
        id_headers: Headers of every answer that have the id of the request, besides `x-request-id`.
        statuses: Further statuses of errors, besides those that any route has.
    """

    schema: Mapping[str, object] = ERROR_SCHEMA
    id_headers: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()

    def answer(self, answer: ErrorAnswer, request_id: str) -> ErrorAnswer:
        """The error in this form."""
        return answer

    def last_event(self, answer: ErrorAnswer, request_id: str, num_events: int) -> bytes:
        """The last event of a stream that failed after so many events."""
        return frame(encode_json(answer.body()))


OPENAI_ERRORS = ErrorForm()
ERROR_FORM = "error_form"
"""Key in the state of a request: the form of its errors."""
