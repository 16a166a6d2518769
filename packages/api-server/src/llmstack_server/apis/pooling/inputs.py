"""Inputs or the conversation of a pooling request, as admitted prompts."""

from __future__ import annotations

from typing import Any

from llmstack_llm import ChatPrompt, RenderedPrompt, request_errors
from llmstack_llm.pooling.admission import AdmittedPooling
from llmstack_server.apis.pooling.engine_run import MAX_NUM_INPUTS, admit_all
from llmstack_server.apis.pooling.protocol import InputFields
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_server.web.sampling import parse_prompts
from llmstack_types import PoolingParams, PoolingTask

MAX_NUMBERS_PER_ANSWER = 1 << 24
"""About half a gigabyte as JSON."""

Prompts = list[tuple[Any, str]]


def parse_inputs(fields: InputFields, body: dict[str, object]) -> Prompts | None:
    """The inputs, each with its name in the request; None for a conversation.

    Raises:
        InvalidRequestError: Both or none are given, there are too many inputs, or one has a wrong type.
    """
    if fields.messages is not None:
        if fields.input is not None:
            raise request_errors.invalid_value("input", "give either 'input' or 'messages'")
        return None
    values, is_list = parse_prompts(fields.input, body, param="input")
    if len(values) > MAX_NUM_INPUTS:
        raise request_errors.array_too_long("input", MAX_NUM_INPUTS, len(values))
    return [(value, f"input[{index}]" if is_list else "input") for index, value in enumerate(values)]


async def admit_inputs(
    state: ServerState, fields: InputFields, prompts: Prompts | None, params: PoolingParams
) -> list[AdmittedPooling]:
    """Tokenizes and checks all inputs, and the size of the answer.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    if prompts is None:
        is_cut = params.truncate_prompt_tokens is not None
        prompts = [(await _render(state, fields, is_cut=is_cut), "messages")]
    return await admit_prompts(
        state, prompts, params, fields.model, add_special_tokens=fields.add_special_tokens is not False
    )


async def admit_prompts(
    state: ServerState, prompts: Prompts, params: PoolingParams, model: str | None, **options: Any
) -> list[AdmittedPooling]:
    """Does the same for given prompts; `model` and `options` are those of `admit_all`."""
    admitted = await admit_all(state, prompts, params, model, **options)
    num_numbers = sum(_num_numbers(state, one) for one in admitted)
    if num_numbers > MAX_NUMBERS_PER_ANSWER:
        raise request_errors.answer_too_large(prompts[0][1].partition("[")[0], MAX_NUMBERS_PER_ANSWER, num_numbers)
    return admitted


async def _render(state: ServerState, fields: InputFields, *, is_cut: bool) -> RenderedPrompt:
    chat = ChatPrompt(
        fields.messages or [],
        add_generation_prompt=bool(fields.add_generation_prompt),
        continue_final_message=bool(fields.continue_final_message),
        template_kwargs=fields.chat_template_kwargs,
        is_cut=is_cut,
        tenant=current_client.get().tenant,
    )
    return await state.engine.render(chat)


def _num_numbers(state: ServerState, one: AdmittedPooling) -> int:
    params, limits = one.pooling_params, state.engine.limits
    task = params.task or PoolingTask.EMBED
    size = limits.num_labels if task.gives_labels else params.dimensions or limits.embedding_size
    return size * (len(one.prompt_token_ids) if task.is_per_token else 1)
