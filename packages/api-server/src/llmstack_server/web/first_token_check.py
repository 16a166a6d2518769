"""The last check of a request: its predicted first token and its deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from llmstack_llm.requests import AdmittedRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.deadlines import current_deadline
from llmstack_server.web.errors import HTTPError, deadline_unreachable

# Clients that were refused together do not return together.
JITTER = 0.2


def with_jitter(wait_s: float) -> float:
    """When to retry after such a wait."""
    return wait_s * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 (nothing secret)


def check_first_token(
    state: ServerState, request_id: str, prompts: Sequence[AdmittedRequest], num_generated: int
) -> Callable[[float], None] | None:
    """The last check of a request, with the exact tokens of its prompts; bound to the first two, it is `on_admitted`.

    `request_id`: The id of its first prompt in the engine.
    `num_generated`: Completions of each prompt.

    Raises:
        HTTPError: 503, its first token would come after its deadline.
    """
    queue, deadline, left_s = state.queue, current_deadline.get(), None
    if deadline is not None:
        left_s = max(deadline.end_s - asyncio.get_running_loop().time(), 0.0)
    num_prompt_tokens = [len(prompt.prompt_token_ids) for prompt in prompts]
    quantum = state.config.engine.fair_quantum
    num_output_tokens = [min(prompt.sampling_params.max_tokens or 0, quantum) for prompt in prompts]
    request = queue.admit(num_prompt_tokens[0], num_output_tokens[0], left_s, prompts[0].sampling_params)
    if request is None:
        return None
    prediction = request.prediction
    if deadline is not None and left_s is not None and prediction is not None and prediction.ttft_s > left_s:
        queue.forget(request)
        state.metrics.count_rejection("deadline")
        retry_s = with_jitter(prediction.ttft_s)
        raise HTTPError(deadline_unreachable(prediction.ttft_s, deadline.limit_s, retry_s))

    queue.note_submitted(sum(num_prompt_tokens) * num_generated, sum(num_output_tokens) * num_generated)
    state.recent_requests.note(request_id, request)

    def note_first_token(real_s: float) -> None:
        queue.first_tokens.note_first(request, real_s)
        if request.expected_s is not None and state.config.http.max_queue_wait_s is not None:
            late_s = time.monotonic() - request.expected_s
            queue.lateness.observe(late_s, state.config.http.max_queue_wait_s)
        if prediction is not None:
            state.metrics.observe_prediction(prediction.ttft_s, real_s)

    return note_first_token
