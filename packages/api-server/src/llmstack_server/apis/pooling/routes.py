"""Routes of the pooling APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from llmstack_server.apis.pooling.classification import prepare_classification
from llmstack_server.apis.pooling.cohere_embed import prepare_cohere_embed
from llmstack_server.apis.pooling.embeddings import prepare_embeddings, prepare_pooling
from llmstack_server.apis.pooling.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmstack_server.apis.pooling.rerank import prepare_rerank
from llmstack_server.apis.pooling.score import prepare_score
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse, Prepare
from llmstack_server.web.openapi import REQUEST_ERRORS, RequestBody


def add_pooling_routes(router: APIRouter, state: ServerState) -> None:
    """Adds embeddings, pooling, classification, scores and reranking, under all paths that clients use."""
    for paths, prepare, body, summary in (
        (("/v1/embeddings",), prepare_embeddings, EmbeddingRequest, "A vector for each of one or several inputs"),
        (("/v2/embed",), prepare_cohere_embed, CohereEmbedRequest, "A vector for each text, in Cohere's form"),
        (("/pooling",), prepare_pooling, PoolingRequest, "The raw numbers of the model for each input"),
        (("/classify",), prepare_classification, ClassificationRequest, "A number for each label, for each input"),
        (("/score", "/v1/score"), prepare_score, ScoreRequest, "The score of each pair of texts"),
        (
            ("/rerank", "/v1/rerank", "/v2/rerank"),
            prepare_rerank,
            RerankRequest,
            "Documents by their score, best first",
        ),
    ):
        for path in paths:
            router.post(
                path,
                summary=summary,
                responses=REQUEST_ERRORS,
                openapi_extra=RequestBody(body),
            )(_endpoint(state, prepare))


def _endpoint(state: ServerState, prepare: Prepare) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return GenerationResponse(state, prepare)

    return answer
