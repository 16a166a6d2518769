"""Submission of prompts to the engine: whose they are, and how long they may take."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llmstack_llm import CheckedSampling, GenerationRequest, GivenSampling
from llmstack_llm.requests import PromptInput
from llmstack_server.state.answer_source import current_source
from llmstack_server.state.repeated_outputs import submit_kept
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import current_deadline, engine_deadline_s, set_deadline
from llmstack_server.web.first_token_check import check_first_token
from llmstack_server.web.sessions import current_session
from llmstack_types import KVTransferParams


async def submit_prompts(
    state: ServerState,
    prompts: Sequence[tuple[PromptInput, str]],
    sampling: GivenSampling | CheckedSampling,
    request_id: str,
    *,
    model: str | None = None,
    priority: int = 0,
    cache_salt: str = "",
    default_max_tokens: int | None = None,
    add_special_tokens: bool = True,
    kv_transfer: KVTransferParams | None = None,
) -> OutputStream:
    """Submits the prompts of the current client, each with its name in the request: all of them or none.

    `request_id`: In the engine, where a number for each prompt follows it.
    `model`: The name in the request, which may be that of an adapter.
    `default_max_tokens`: As in `GenerationRequest`.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
        HTTPError: 503, the first token would come after the client's deadline.
    """
    client, deadline, timeout_s = current_client.get(), current_deadline.get(), state.config.http.request_timeout_s
    session = current_session.get()
    adapter = adapter_of(state, model)
    requests = [
        GenerationRequest(
            f"{request_id}-{index}",
            value,
            sampling,
            param=param,
            priority=priority,
            cache_salt=client.salt + cache_salt,
            tenant=client.tenant,
            adapter=adapter,
            default_max_tokens=default_max_tokens,
            deadline_s=None if deadline is None else engine_deadline_s(),
            on_admitted=functools.partial(check_first_token, state, f"{request_id}-0"),
            add_special_tokens=add_special_tokens,
            kv_transfer=kv_transfer,
            session=session.name,
            is_session_final=session.is_final,
        )
        for index, (value, param) in enumerate(prompts)
    ]
    source, engine = current_source.get(), state.engine
    outputs = await (engine.submit(*requests) if source is None else submit_kept(engine, source, *requests))
    if deadline is not None or timeout_s is not None:
        set_deadline(outputs, timeout_s)
    return outputs
