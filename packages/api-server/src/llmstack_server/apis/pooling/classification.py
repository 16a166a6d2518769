"""`POST /classify`: a score for each label, for each input."""

from __future__ import annotations

from llmstack_llm import PoolingOutput
from llmstack_server.apis.pooling.inputs import admit_inputs, parse_inputs
from llmstack_server.apis.pooling.list_answer import ListAnswer
from llmstack_server.apis.pooling.protocol import ClassificationRequest
from llmstack_server.apis.pooling.unsupported import INPUTS
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import claim_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse
from llmstack_types import PoolingParams, PoolingTask


async def prepare_classification(state: ServerState, body: dict[str, object]) -> ListAnswer:
    """Checks a request and tokenizes its inputs.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(ClassificationRequest, body)
    prompts = parse_inputs(fields, body)
    check_fields(state, body, fields, INPUTS)
    ids = await claim_ids(state, "classify", fields.request_id)
    params = PoolingParams(
        task=PoolingTask.CLASSIFY,
        use_activation=fields.use_activation,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        truncation_side=fields.truncation_side or "right",
    )
    inputs = await admit_inputs(state, fields, prompts, params)
    names = state.engine.label_names

    def describe(index: int, numbers: PoolingOutput) -> dict[str, object]:
        probabilities = numbers.data.tolist()
        best = probabilities.index(max(probabilities))
        label = names.get(best, f"LABEL_{best}")  # what transformers calls a label without a name
        return {"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)}

    return ListAnswer(state, fields, inputs, describe, ids)
