"""`POST /rerank`, in the form of Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_llm import request_errors
from llmstack_llm.pooling.score_content import ScoreContent, ScoreText
from llmstack_server.apis.pooling.protocol import RerankRequest
from llmstack_server.apis.pooling.scores import ScoreJob, parse_contents, prepare_scores
from llmstack_server.apis.pooling.unsupported import RERANK
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds, WholeAnswer, claim_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse


async def prepare_rerank(state: ServerState, body: dict[str, object]) -> RerankAnswer:
    """Checks a request and tokenizes its texts.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(RerankRequest, body)
    query = parse_contents(fields.query, "query")
    if len(query) > 1:
        raise request_errors.invalid_type("query", "a string", fields.query)
    documents = parse_contents(fields.documents, "documents")
    check_fields(state, body, fields, RERANK)
    if fields.top_n is not None and fields.top_n < 0:
        raise request_errors.below_min("top_n", 0, fields.top_n, is_integer=True)
    ids = await claim_ids(state, "rerank", fields.request_id)
    names = ("query", "documents")
    job = await prepare_scores(state, fields, (query, documents), names)
    return RerankAnswer(job, fields, documents, ids)


class RerankAnswer(WholeAnswer):
    """The ranked documents of one request."""

    def __init__(self, job: ScoreJob, fields: RerankRequest, documents: Sequence[ScoreText], ids: AnswerIds) -> None:
        self._job = job
        self._fields = fields
        self._documents = documents
        self._ids = ids

    async def whole(self) -> dict[str, object]:
        """The best documents, best first; equal scores keep the order of the request."""
        job = self._job
        scores = await job.run(self._ids.engine)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._fields.top_n or None]
        return {
            "id": self._ids.answer,
            "model": self._fields.model or job.state.served_model_name,
            "usage": {"prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens},
            "results": [self._result(index, scores[index]) for index in best],
        }

    def _result(self, index: int, score: float) -> dict[str, object]:
        result: dict[str, object] = {"index": index, "relevance_score": score}
        if self._fields.return_documents is not False:
            one = self._documents[index]
            result["document"] = {"multi_modal": one.given} if isinstance(one, ScoreContent) else {"text": one}
        return result
