"""The routes of everything that is pooled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from llmstack_server.http.openapi import error_responses, request_body
from llmstack_server.openai.serving import GenerationResponse, Prepare
from llmstack_server.pooling.classification import prepare_classification
from llmstack_server.pooling.cohere_embed import prepare_cohere_embed
from llmstack_server.pooling.embeddings import prepare_embeddings, prepare_pooling
from llmstack_server.pooling.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmstack_server.pooling.rerank import prepare_rerank
from llmstack_server.pooling.score import prepare_score
from llmstack_server.state import ServerState


def add_pooling_routes(router: APIRouter, state: ServerState) -> None:
    """Vectors, raw numbers, labels, scores and documents in order, under all the paths that clients know."""
    for paths, prepare, body, summary in (
        (("/v1/embeddings",), prepare_embeddings, EmbeddingRequest, "A vector for each of one or several inputs"),
        (("/v2/embed",), prepare_cohere_embed, CohereEmbedRequest, "The same in Cohere's form"),
        (("/pooling",), prepare_pooling, PoolingRequest, "What the model makes of each input"),
        (("/classify",), prepare_classification, ClassificationRequest, "A number for each label, for each input"),
        (("/score", "/v1/score"), prepare_score, ScoreRequest, "How well pairs of texts fit"),
        (("/rerank", "/v1/rerank", "/v2/rerank"), prepare_rerank, RerankRequest, "Documents by how well they fit"),
    ):
        for path in paths:
            router.post(
                path,
                summary=summary,
                responses=error_responses(400, 401, 404, 413, 415, 500, 503),
                openapi_extra=request_body(body),
            )(_endpoint(state, prepare))


def _endpoint(state: ServerState, prepare: Prepare) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return GenerationResponse(state, prepare)

    return answer
