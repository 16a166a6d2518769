"""`POST /invocations`, for hosting platforms that offer a single route."""

from __future__ import annotations

from starlette.responses import Response

from llmstack_server.apis.openai.chat import prepare_chat
from llmstack_server.apis.openai.completions import prepare_completion
from llmstack_server.apis.pooling.classification import prepare_classification
from llmstack_server.apis.pooling.embeddings import prepare_embeddings
from llmstack_server.apis.pooling.rerank import prepare_rerank
from llmstack_server.apis.pooling.score import prepare_score
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse, Prepare, WholeAnswer
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.openapi_bodies import AnyRequestBody
from llmstack_server.web.routes import Router, RouteSpec


def add_invocations_route(router: Router, state: ServerState) -> None:
    body = AnyRequestBody(("messages", "prompt", "input", "documents", "text_1"))

    @router.declare(RouteSpec(
        "POST", "/invocations", dict[str, object], tag="Chat", body=body, streams=True, waits=True
    ))  # fmt: skip
    async def invocations() -> Response:
        """Answers a request to any generating or pooling route; the body decides which."""
        return GenerationResponse(state, prepare_invocation)


# A field that only one API has; the first one in the body decides.
_FIELD_TO_PREPARE: dict[str, Prepare] = {
    "messages": prepare_chat,
    "prompt": prepare_completion,
    "documents": prepare_rerank,
    "text_1": prepare_score,
    "queries": prepare_score,
    "input": prepare_embeddings,
}


async def prepare_invocation(state: ServerState, body: dict[str, object]) -> WholeAnswer:
    """Prepares the request by the API that its body is for.

    Raises:
        InvalidRequestError: A field is invalid, or no field identifies the API.
    """
    limits = state.engine.limits
    for field, prepare in _FIELD_TO_PREPARE.items():
        if field not in body:
            continue
        if field == "input" or (field == "messages" and not limits.is_generative):
            prepare = prepare_classification if limits.num_labels else prepare_embeddings
        return await prepare(state, body)
    message = "The body does not say which API it is for: give 'messages', 'prompt', 'input', 'documents' or 'text_1'."
    raise missing_parameter("messages", message)
