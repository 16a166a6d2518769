"""The route of OpenAI's Decisions API."""

from __future__ import annotations

from starlette.responses import Response

from llmstack_server.apis.decisions.answer import prepare_decisions
from llmstack_server.apis.decisions.objects import Decision
from llmstack_server.apis.decisions.protocol import INPUT_SCHEMA, QUESTIONS_SCHEMA, DecisionRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Router, RouteSpec


def add_decision_routes(router: Router, state: ServerState) -> None:
    """Adds the route `/v1/decisions`."""

    @router.declare(RouteSpec(
        "POST", "/v1/decisions", Decision, tag="Decisions", waits=True,
        body=RequestBody(DecisionRequest, required={"input": INPUT_SCHEMA, "questions": QUESTIONS_SCHEMA}),
    ))  # fmt: skip
    async def decisions() -> Response:
        """Answers typed questions about a text with probabilities, and writes nothing."""
        return GenerationResponse(state, prepare_decisions)
