"""From a conversation to its stream: checks, the template, the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_llm import request_errors
from llmstack_llm.admit import admit_sampling_params
from llmstack_output_parsers import TOOL_PARSERS
from llmstack_server.chat.constraints import after_reasoning, constraint_name, with_tool_constraint
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.reading import ReadingPlan, ReasoningPlan
from llmstack_server.chat.reasoning import is_open_in, tag_ids
from llmstack_server.chat.stream import ChatStream
from llmstack_server.chat.tools import ToolMode, ToolUse, check_tools
from llmstack_server.openai.sampling import PARAM_NAMES
from llmstack_server.openai.unsupported import unsupported
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
    tool_use = _tool_use(state, conversation)
    of_request = params.structured_outputs
    if tool_use.is_forced or tool_use.strict_names:
        # On a thread: schemas may be megabytes.
        params = await asyncio.to_thread(with_tool_constraint, params, tool_use, state.chat_parsers.tool)
    source = constraint_name(params.structured_outputs, param_names, tool_use if of_request is None else None)
    rendered = await _render(state, conversation, tool_use)
    reading = await _reading_plan(state, conversation, tool_use, rendered["prompt"])
    if params.structured_outputs is not None and reading.reasoning is not None:
        params, reading = await asyncio.to_thread(_fit_together, params, reading, reading.reasoning)
    if reading.kept_special_tokens:
        params = replace(params, kept_special_tokens=reading.kept_special_tokens)
    param_names = {**param_names, constraint_name(params.structured_outputs): source}
    prompt = await state.engine.admit(rendered, params, param="messages", param_names=param_names)
    return ChatStream(
        state.engine,
        prompt,
        request_id,
        reading=None if reading.is_trivial else reading,
        priority=priority,
        cache_salt=cache_salt,
    )


async def render_conversation(state: ServerState, conversation: Conversation) -> Any:
    """The prompt as `{"prompt": text, "prompt_token_ids": ids}`.

    Raises:
        InvalidRequestError: Names the message and the field at fault.
    """
    tool_use = check_tools(conversation.tools, conversation.tool_choice)
    return await _render(state, conversation, tool_use)


async def _render(state: ServerState, conversation: Conversation, tool_use: ToolUse) -> Any:
    options = state.config.chat
    if conversation.chat_template is not None and not options.trusts_request_template:
        raise unsupported("chat_template")
    is_shown = tool_use.mode is not ToolMode.NONE or not options.excludes_unused_tools
    return await state.engine.render_chat(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        tools=tool_use.tools if is_shown and tool_use.tools else None,
        documents=conversation.documents,
        chat_template=conversation.chat_template,
        chat_template_kwargs=_template_kwargs(state, conversation),
    )


def _template_kwargs(state: ServerState, conversation: Conversation) -> Mapping[str, Any]:
    """The server's, then what the effort means to templates, then the request's own."""
    kwargs = {**state.config.chat.template_kwargs}
    effort = conversation.reasoning_effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    return {**kwargs, **(conversation.chat_template_kwargs or {})}


def _tool_use(state: ServerState, conversation: Conversation) -> ToolUse:
    tool_use = check_tools(conversation.tools, conversation.tool_choice, is_parallel=conversation.parallel_tool_calls)
    if tool_use.mode is ToolMode.AUTO and state.chat_parsers.tool is None:
        reason = (
            "how this model writes tool calls is not known here; the server has to be started with "
            f"--tool-call-parser ({', '.join(sorted(TOOL_PARSERS))})"
        )
        raise request_errors.unsupported_value("tools", reason)
    return tool_use


async def _reading_plan(state: ServerState, conversation: Conversation, tool_use: ToolUse, prompt: str) -> ReadingPlan:
    tool_parser = state.chat_parsers.tool if tool_use.mode is ToolMode.AUTO else None
    parser = state.chat_parsers.reasoning
    if parser is None:
        return ReadingPlan(tool_use, tool_parser)
    kwargs = _template_kwargs(state, conversation)
    is_open = is_open_in(prompt, replace(conversation, chat_template_kwargs=kwargs), parser)
    tokenizer = await state.engine.get_tokenizer()
    reasoning = ReasoningPlan(
        parser,
        is_open,
        conversation.include_reasoning,
        tag_ids(tokenizer, parser),
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    return ReadingPlan(tool_use, tool_parser, reasoning)


def _fit_together(
    params: SamplingParams, reading: ReadingPlan, reasoning: ReasoningPlan
) -> tuple[SamplingParams, ReadingPlan]:
    """A constraint holds for what follows the reasoning; where it cannot, there is no reasoning."""
    constraint = params.structured_outputs
    if constraint is None or reasoning.is_open is False:
        return params, reading
    later = after_reasoning(constraint, reasoning)
    if later is None:
        return params, replace(reading, reasoning=None)
    return replace(params, structured_outputs=later), reading
