"""The routes of the Messages API."""

from __future__ import annotations

from starlette.responses import Response

from llmstack_server.apis.anthropic.errors import ANTHROPIC_ERRORS
from llmstack_server.apis.anthropic.messages import prepare_count, prepare_messages
from llmstack_server.apis.anthropic.protocol import CountTokensRequest, MessagesRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.api_types import CountedTokens, Message
from llmstack_server.web.openapi_bodies import MESSAGE_TOOLS, TURNS, RequestBody
from llmstack_server.web.routes import Router, RouteSpec


def add_anthropic_routes(router: Router, state: ServerState) -> None:
    """`/v1/messages` and what belongs to it."""
    max_tokens = {"type": "integer", "minimum": 1}

    @router.declare(RouteSpec(
        "POST", "/v1/messages", Message, tag="Messages", errors=ANTHROPIC_ERRORS,
        body=RequestBody(
            MessagesRequest, required={"messages": TURNS, "max_tokens": max_tokens}, fields={"tools": MESSAGE_TOOLS},
            has_ranges=False,
        ),
        streams=True, waits=True, is_resumable=True, is_in_batches=True,
    ))  # fmt: skip
    async def messages() -> Response:
        """Answers a conversation in Anthropic's form."""
        return GenerationResponse(state, prepare_messages)

    @router.declare(RouteSpec(
        "POST", "/v1/messages/count_tokens", CountedTokens, tag="Messages", errors=ANTHROPIC_ERRORS,
        body=RequestBody(
            CountTokensRequest, required={"messages": TURNS}, fields={"tools": MESSAGE_TOOLS}, has_ranges=False
        ),
    ))  # fmt: skip
    async def count_tokens() -> Response:
        """The number of tokens that the model would read."""
        return GenerationResponse(state, prepare_count)
