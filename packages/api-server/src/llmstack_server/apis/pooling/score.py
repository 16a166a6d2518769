"""`POST /score`: the score of each pair of texts or pictures."""

from __future__ import annotations

import time

from llmstack_llm import request_errors
from llmstack_server.apis.pooling.protocol import ScoreRequest
from llmstack_server.apis.pooling.scores import ScoreJob, parse_contents, prepare_scores
from llmstack_server.apis.pooling.unsupported import SCORES
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds, WholeAnswer, claim_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse

# Names that clients use for the two lists; a request has one pair of them.
_NAMES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


async def prepare_score(state: ServerState, body: dict[str, object]) -> ScoreAnswer:
    """Checks a request and tokenizes its texts.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(ScoreRequest, body)
    names = _names(fields)
    texts = (parse_contents(getattr(fields, names[0]), names[0]), parse_contents(getattr(fields, names[1]), names[1]))
    check_fields(state, body, fields, SCORES)
    ids = await claim_ids(state, "score", fields.request_id)
    return ScoreAnswer(await prepare_scores(state, fields, texts, names), ids)


def _names(fields: ScoreRequest) -> tuple[str, str]:
    """The names that the request uses; a missing list is reported under the name that belongs to the other."""
    given = {name for names in _NAMES for name in names if getattr(fields, name) is not None}
    found = [names for names in _NAMES if given.issuperset(names)] or [names for names in _NAMES if given & {*names}]
    if not found:
        raise missing_parameter("text_1")
    for name in sorted(given.difference(found[0])):
        raise request_errors.invalid_value(name, f"the lists are '{found[0][0]}' and '{found[0][1]}' already")
    return found[0]


class ScoreAnswer(WholeAnswer):
    """The scores of one request."""

    def __init__(self, job: ScoreJob, ids: AnswerIds) -> None:
        self._job = job
        self._ids = ids

    async def whole(self) -> dict[str, object]:
        """A `list` with one score for each pair, in their order."""
        job = self._job
        scores = await job.run(self._ids.engine)
        return {
            "id": self._ids.answer,
            "object": "list",
            "created": int(time.time()),
            "model": job.fields.model or job.state.served_model_name,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": {
                "prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens, "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }  # fmt: skip
