"""Admission and execution of the prompts of a pooling request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from llmstack_llm import PoolingRequestOutput
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_server.state.queue_monitor import current_request
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import timed
from llmstack_server.web.fields import PoolingFields
from llmstack_server.web.streams import merge
from llmstack_types import PoolingParams

_NO_NAMES: Mapping[str, str] = {}
MAX_NUM_INPUTS = 2048
"""Inputs of one request at most, as at OpenAI."""
MAX_NUM_IN_FLIGHT = 256
"""Inputs of one request in the engine at once: more would fill its queue, and 256 fill any step."""


async def admit_all(
    state: ServerState,
    prompts: Iterable[tuple[Any, str]],
    params: PoolingParams,
    model: str | None,
    *,
    add_special_tokens: bool = True,
    param_names: Mapping[str, str] = _NO_NAMES,
) -> list[AdmittedPooling]:
    """Tokenizes and checks each prompt; its name in the request appears in errors.

    `model`: The served model, or the adapter to use.

    `param_names`: Field of the parameters to its name in the request, where the two differ.

    Raises:
        InvalidRequestError: Names the first invalid field, or the adapter was unloaded meanwhile.
    """
    adapter = adapter_of(state, model)
    admitted = []
    for prompt, param in prompts:
        admit = state.engine.admit_pooling
        options: dict[str, Any] = {
            "param": param, "param_names": param_names, "add_special_tokens": add_special_tokens, "adapter": adapter
        }  # fmt: skip
        admitted.append(await admit(prompt, params, **options))
        await asyncio.sleep(0)  # short texts are tokenized on the event loop, and there may be thousands
    return admitted


async def run_all(
    state: ServerState, inputs: Sequence[AdmittedPooling], fields: PoolingFields, request_id: str
) -> AsyncIterator[tuple[int, PoolingRequestOutput]]:
    """The output of each input with its index, as they come; closing the iterator aborts the rest."""
    client, priority = current_client.get(), fields.priority or 0
    tenant, cache_salt = client.tenant, client.salt + (fields.cache_salt or "")
    first = inputs[:MAX_NUM_IN_FLIGHT]
    # Once for all: a request must not be refused by its own inputs.
    state.engine.check_room(len(first), count_tokens(first), tenant, "input")
    state.queue.note_submitted(count_tokens(inputs), 0)
    request = current_request.get()
    if request is not None:
        state.recent_requests.note(f"{request_id}-0", request)
    encode = partial(state.engine.encode, priority=priority, cache_salt=cache_salt, tenant=tenant, has_room=True)
    for start in range(0, len(inputs), MAX_NUM_IN_FLIGHT):
        streams: list[AsyncIterator[PoolingRequestOutput]] = [
            timed(encode(one, None, f"{request_id}-{index}"), state.config.http.request_timeout_s)
            for index, one in enumerate(inputs[start : start + MAX_NUM_IN_FLIGHT], start)
        ]
        async for index, output in merge(streams):
            yield start + index, output


def count_tokens(inputs: Sequence[AdmittedPooling]) -> int:
    """The number of prompt tokens of all inputs."""
    return sum(len(one.prompt_token_ids) for one in inputs)
