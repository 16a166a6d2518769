"""`POST /invocations`: the one route of hosting platforms that know no paths; the body says which API is meant."""

from __future__ import annotations

from typing import Any

from llmstack_server.http.errors import missing_parameter
from llmstack_server.openai.chat import prepare_chat
from llmstack_server.openai.completions import prepare_completion
from llmstack_server.openai.serving import Prepare, WholeAnswer
from llmstack_server.pooling.classification import prepare_classification
from llmstack_server.pooling.embeddings import prepare_embeddings
from llmstack_server.pooling.rerank import prepare_rerank
from llmstack_server.pooling.score import prepare_score
from llmstack_server.state import ServerState

# The field that only one API has; the first one found decides.
_FIELD_TO_PREPARE: dict[str, Prepare] = {
    "messages": prepare_chat,
    "prompt": prepare_completion,
    "documents": prepare_rerank,
    "text_1": prepare_score,
    "queries": prepare_score,
    "input": prepare_embeddings,
}


async def prepare_invocation(state: ServerState, body: dict[str, Any]) -> WholeAnswer:
    """Checks a request as the route does that it is meant for.

    Raises:
        InvalidRequestError: Names the first field at fault, or that nothing tells what is meant.
    """
    for field, prepare in _FIELD_TO_PREPARE.items():
        if field in body:
            is_classified = field == "input" and state.limits.num_labels
            return await (prepare_classification if is_classified else prepare)(state, body)
    message = "Nothing tells what is asked for: give 'messages', 'prompt', 'input', 'documents' or 'text_1'."
    raise missing_parameter("messages", message)
