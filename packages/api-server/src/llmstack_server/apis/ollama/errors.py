"""Errors in Ollama's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from llmstack_server.web.error_forms import ErrorForm
from llmstack_server.web.errors import MAX_MESSAGE_CHARS, ErrorAnswer
from llmstack_server.web.sse import encode_json


@dataclass(frozen=True, slots=True)
class OllamaErrorAnswer(ErrorAnswer):
    """One error in Ollama's form."""

    def body(self) -> dict[str, object]:
        """The JSON object of the API: its message alone, which names the invalid field."""
        is_named = self.param is None or self.param in self.message
        message = self.message if is_named else f"{self.param}: {self.message}"
        return {"error": message[:MAX_MESSAGE_CHARS]}


class OllamaErrors(ErrorForm):
    """The form of Ollama's API, where an error is a text."""

    schema: Mapping[str, object] = MappingProxyType({
        "type": "object", "required": ["error"], "properties": {"error": {"type": "string"}},
    })  # fmt: skip

    def answer(self, answer: ErrorAnswer, request_id: str) -> ErrorAnswer:
        """The error in Ollama's form, whose body is its message."""
        return OllamaErrorAnswer(*(getattr(answer, field.name) for field in fields(ErrorAnswer)))

    def last_event(self, answer: ErrorAnswer, request_id: str, num_events: int) -> bytes:
        """The last line of a stream that failed."""
        return json_line(self.answer(answer, request_id).body())


OLLAMA_ERRORS = OllamaErrors()


def json_line(value: Mapping[str, object]) -> bytes:
    """A line of a stream: one object."""
    return f"{encode_json(value)}\n".encode("utf-8", "replace")
