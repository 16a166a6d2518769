"""The routes of the Messages API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from llmstack_server.apis.anthropic.messages import prepare_count, prepare_messages
from llmstack_server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.openapi import STREAM, RequestBody, error_responses

_ERROR_SCHEMA: dict[str, Any] = {
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
}


def add_anthropic_routes(router: APIRouter, state: ServerState) -> None:
    """`/v1/messages` and what belongs to it."""
    errors = error_responses(400, 401, 404, 413, 415, 500, 503, 529, schema=_ERROR_SCHEMA)

    @router.post("/v1/messages", responses=STREAM | errors, openapi_extra=RequestBody(MessagesRequest))
    async def messages() -> Response:
        """Answers a conversation in Anthropic's form."""
        return GenerationResponse(state, prepare_messages)

    @router.post("/v1/messages/count_tokens", responses=errors, openapi_extra=RequestBody(CountTokensRequest))
    async def count_tokens() -> Response:
        """How many tokens the model would read."""
        return GenerationResponse(state, prepare_count)
