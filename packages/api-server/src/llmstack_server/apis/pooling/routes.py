"""Routes of the pooling APIs."""

from __future__ import annotations

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
from llmstack_server.web.answer_types import (
    Classification,
    CohereEmbeddings,
    Embeddings,
    PooledInputs,
    Ranking,
    Scores,
)
from llmstack_server.web.answers import Prepare, endpoint
from llmstack_server.web.openapi_bodies import POOLING, RERANK, SCORES, TEXT_LIST, RequestBody
from llmstack_server.web.routes import Router, RouteSpec


def add_pooling_routes(router: Router, state: ServerState) -> None:
    """Adds embeddings, pooling, classification, scores and reranking, under all paths that clients use."""

    def add(
        path: str, prepare: Prepare, body: RequestBody, answer: type, summary: str, *, is_in_batches: bool = False
    ) -> None:
        spec = RouteSpec(
            "POST", path, answer, tag="Pooling", body=body, waits=True, is_in_batches=is_in_batches
        )  # fmt: skip
        router.declare(spec, summary)(endpoint(state, prepare))

    embedding = RequestBody(EmbeddingRequest, one_of=POOLING)
    add(
        "/v1/embeddings", prepare_embeddings, embedding, Embeddings, "A vector for each of one or several inputs",
        is_in_batches=True,
    )  # fmt: skip
    cohere = RequestBody(CohereEmbedRequest, required={"texts": TEXT_LIST})
    add("/v2/embed", prepare_cohere_embed, cohere, CohereEmbeddings, "A vector for each text, in Cohere's form")
    pooling = RequestBody(PoolingRequest, one_of=POOLING)
    add("/pooling", prepare_pooling, pooling, PooledInputs, "The raw numbers of the model for each input")
    classified = RequestBody(ClassificationRequest, one_of=POOLING)
    add("/classify", prepare_classification, classified, Classification, "A number for each label, for each input")
    for path in ("/score", "/v1/score"):
        score = RequestBody(ScoreRequest, one_of=SCORES)
        add(path, prepare_score, score, Scores, "The score of each pair of texts")
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        add(
            path,
            prepare_rerank,
            RequestBody(RerankRequest, required=RERANK),
            Ranking,
            "Documents by their score, best first",
        )
