"""The response object in every state of a response."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmstack_server.apis.responses.protocol import ResponseRequest
from llmstack_server.apis.responses.store import Item
from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.usage import UsageCounter
from llmstack_types import SamplingParams
from llmstack_types.json_values import JSONObject


@dataclass(slots=True)
class ResponseObject:
    """The response object of one request, which changes with its state.

    Attributes:
        status: `queued`, `in_progress`, `completed`, `incomplete`, `failed` or `cancelled`.
        error: The error of a failed response.
    """

    id: str
    model: str
    fields: ResponseRequest
    params: SamplingParams
    is_stored: bool
    status: str = "in_progress"
    error: ErrorAnswer | None = None
    created_at: int = field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self.status not in ("queued", "in_progress")

    def complete(self, status: str) -> None:
        """Sets the final status."""
        self.status = status
        self.completed_at = int(time.time()) if status == "completed" else None

    def as_object(self, output: Sequence[Item], usage: UsageCounter | None) -> JSONObject:
        """The object of the API, with every key of its schema; `usage` is left out where there is none, never null."""
        found: dict[str, object] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": self.status,
            "completed_at": self.completed_at,
            "error": None if self.error is None else error_object(self.error),
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": self.model,
            "output": list(output),
            **self._echo(),
        }
        return found if usage is None else found | {"usage": usage_object(usage)}

    def _echo(self) -> JSONObject:
        """The parameters of the request, with defaults."""
        fields, params = self.fields, self.params
        reasoning, text = fields.reasoning, fields.text
        echo: dict[str, object] = {
            "access_programs": None,  # for OpenAI's own models; the schema requires the key
            "background": bool(fields.background),
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": self.is_stored,
            "temperature": params.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": (text and text.verbosity) or "medium",
            },
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": [_tool_object(tool) for tool in fields.tools or ()],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": fields.truncation or "disabled",
        }
        return echo if fields.user is None else echo | {"user": fields.user}  # the schema has no null here


def _tool_object(tool: JSONObject) -> JSONObject:
    return {"description": None, "parameters": None, "strict": None, **tool}


def error_object(error: ErrorAnswer) -> JSONObject:
    """The error of a response, in one of the few codes of the API; the message has the details."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": code, "message": error.message}


def usage_object(usage: UsageCounter) -> JSONObject:
    """The `usage` object of the API."""
    counts = usage.as_object()
    input_details = counts.get("prompt_tokens_details") or {}
    output_details = counts.get("completion_tokens_details") or {}
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **input_details},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": output_details.get("reasoning_tokens", 0)},
        "total_tokens": counts["total_tokens"],
    }
