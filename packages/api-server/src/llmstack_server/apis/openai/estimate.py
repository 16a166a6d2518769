"""`POST /v1/estimate`: when the first token of a request would come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from llmstack_llm import request_errors
from llmstack_server.apis.openai.render import render_chat, render_completions
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import check_model
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, engine_unavailable, missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.sampling import check_deadline_ms
from llmstack_types.json_values import JSONObject

if TYPE_CHECKING:
    from llmstack_server.web.answer_types import Estimate

MAX_OUTPUT_TOKENS = 2**31 - 1


class EstimateRequest(BaseModel):
    """Body of `POST /v1/estimate`: one of these fields with a prompt, or the body of a chat or completion."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = Field(None, description="a served name; may be left out while one model is served")
    prompt_tokens: int | None = Field(None, description="the number of prompt tokens, in place of a prompt")
    messages: Any = Field(None, description="as in a chat")
    prompt: Any = Field(None, description="as in a completion; of several prompts the first counts")
    max_tokens: int | None = None
    deadline_ms: int | None = Field(None, description="milliseconds that the request would be given")


async def estimate(state: ServerState, body: dict[str, object]) -> Estimate:
    """The predicted wait and time to the first token, and whether a deadline would be accepted.

    Raises:
        InvalidRequestError: Names the first invalid field.
        HTTPError: 503, too few steps were measured for a prediction.
    """
    fields = parse(EstimateRequest, body)
    check_model(state, fields.model)
    check_deadline_ms(fields.deadline_ms)
    num_tokens = await _num_prompt_tokens(state, fields, body)
    num_output_tokens = min(fields.max_tokens or 0, state.config.engine.fair_quantum)
    left_s = None if fields.deadline_ms is None else fields.deadline_ms / 1000
    tenant = current_client.get().tenant
    prediction = state.queue.predict_first_token(num_tokens, num_tokens + num_output_tokens, tenant, left_s)
    if prediction is None:
        raise HTTPError(engine_unavailable("Too few steps were measured for a prediction. Please retry later."))
    return {
        "object": "estimate",
        "prompt_tokens": num_tokens,
        "predicted_wait_ms": round(prediction.wait_s * 1000),
        "predicted_ttft_ms": round(prediction.ttft_s * 1000),
        "deadline_ms": fields.deadline_ms,
        "can_meet_deadline": None if left_s is None else prediction.ttft_s <= left_s,
    }


async def _num_prompt_tokens(state: ServerState, fields: EstimateRequest, body: JSONObject) -> int:
    if fields.prompt_tokens is None:
        if fields.messages is None and fields.prompt is None:
            raise missing_parameter("prompt_tokens")
        if fields.messages is not None:
            rendered = await render_chat(state, body, is_counted=True)
        else:
            rendered = (await render_completions(state, body))[0]
        return len(rendered["token_ids"])
    longest = state.engine.limits.max_request_tokens
    for name, number, least, most in (
        ("prompt_tokens", fields.prompt_tokens, 1, longest),
        ("max_tokens", fields.max_tokens, 0, MAX_OUTPUT_TOKENS),
    ):
        if number is not None and number < least:
            raise request_errors.below_min(name, least, number, is_integer=True)
        if number is not None and number > most:
            raise request_errors.above_max(name, most, number, is_integer=True)
    return fields.prompt_tokens
