"""From a conversation to its stream: checks, the template, the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_llm.admit import admit_sampling_params
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.stream import ChatStream
from llmstack_server.openai.sampling import PARAM_NAMES
from llmstack_server.state import ServerState
from llmstack_types import SamplingParams


async def prepare_chat_generation(
    state: ServerState,
    conversation: Conversation,
    params: SamplingParams,
    *,
    request_id: str,
    param_names: Mapping[str, str] = PARAM_NAMES,
    priority: int = 0,
    cache_salt: str = "",
) -> ChatStream:
    """Checks a request, renders its conversation and tokenizes it.

    `params.output_kind` says whether it will be read as deltas (`DELTA`) or at its end (`FINAL_ONLY`).
    `param_names`: What the API calls the fields of `SamplingParams`, for the errors.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    params = admit_sampling_params(params, state.limits, param_names=param_names)
    rendered = await render_conversation(state, conversation)
    prompt = await state.engine.admit(rendered, params, param="messages", param_names=param_names)
    return ChatStream(state.engine, prompt, request_id, priority=priority, cache_salt=cache_salt)


async def render_conversation(state: ServerState, conversation: Conversation) -> Any:
    """The prompt as `{"prompt": text, "prompt_token_ids": ids}`.

    Raises:
        InvalidRequestError: Names the message and the field at fault.
    """
    return await state.engine.render_chat(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        chat_template_kwargs=conversation.chat_template_kwargs,
    )
