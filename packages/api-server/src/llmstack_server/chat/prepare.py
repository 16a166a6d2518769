"""Checks, rendering and submission of a conversation."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from llmstack_llm import (
    ChatPrompt,
    CheckedSampling,
    GenerationRequest,
    GivenSampling,
    RenderedPrompt,
    request_errors,
)
from llmstack_llm.text.gate import in_thread
from llmstack_output_parsers import TOOL_PARSERS
from llmstack_server.chat.constraints import after_reasoning, constraint_name, with_tool_constraint
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.reading import ReadingPlan, ReasoningPlan
from llmstack_server.chat.reasoning import is_open_in, tag_ids, thinking_tags
from llmstack_server.chat.stored_media import with_stored_media
from llmstack_server.chat.tools import FORCED_MODES, ToolMode, ToolUse, check_tools
from llmstack_server.state.answer_source import current_source
from llmstack_server.state.repeated_outputs import submit_kept
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import current_deadline, engine_deadline_s, set_deadline
from llmstack_server.web.first_token_check import check_first_token
from llmstack_server.web.sessions import current_session
from llmstack_server.web.structured import constraint_options
from llmstack_server.web.unsupported import unsupported
from llmstack_types import KVTransferParams, RequestOutputKind

_NO_TOOLS = ToolUse()


class SubmittedChat(NamedTuple):
    """A conversation in the engine: its outputs, and how to read them; the arguments of `ChatStream`."""

    outputs: OutputStream
    plan: ReadingPlan | None


async def submit_chat(
    state: ServerState,
    conversation: Conversation,
    given: GivenSampling,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str = "",
    model: str | None = None,
    request_type: str = "other",
    kv_transfer: KVTransferParams | None = None,
) -> SubmittedChat:
    """Checks the sampling fields and the tools, renders the conversation and submits it.

    `model`: The name in the request, which may be that of an adapter.
    `kv_transfer`: The KV blocks to export or import.
    `request_type`: The API, for metrics: `chat_completions`, `responses` or `other`.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    tool_use = _NO_TOOLS
    fields: GivenSampling | CheckedSampling = given
    if conversation.tools is not None or conversation.tool_choice is not None:
        tool_use, fields = await _with_tools(state, conversation, given)
    prompt = await state.engine.render(await _chat_prompt(state, conversation, tool_use), fields)
    sampling, plan = prompt.sampling, None
    if state.chat_parsers.reasoning is not None or tool_use.mode is not ToolMode.NONE:
        sampling, plan = await _plan(state, conversation, tool_use, prompt)
    if plan is not None and plan.tool_parser is not None:
        is_stream = given.values.get("output_kind") is RequestOutputKind.DELTA
        count = functools.partial(_count_parsed, state, request_type, is_stream)
        plan = replace(plan, on_parsed=count)
    client, deadline, timeout_s = current_client.get(), current_deadline.get(), state.config.http.request_timeout_s
    session = current_session.get()
    request = GenerationRequest(
        request_id, prompt, sampling, param="messages", priority=priority, cache_salt=client.salt + cache_salt,
        tenant=client.tenant, adapter=adapter_of(state, model),
        deadline_s=None if deadline is None else engine_deadline_s(),
        on_admitted=functools.partial(check_first_token, state, request_id),
        kv_transfer=kv_transfer, session=session.name, is_session_final=session.is_final,
    )  # fmt: skip
    source = current_source.get()
    outputs = await (state.engine.submit(request) if source is None else submit_kept(state.engine, source, request))
    if deadline is not None or timeout_s is not None:
        set_deadline(outputs, timeout_s)
    return SubmittedChat(outputs, None if plan is None or plan.is_trivial else plan)


def _count_parsed(state: ServerState, request_type: str, is_stream: bool, has_calls: bool) -> None:
    state.metrics.count_tool_parsing(request_type, is_stream=is_stream, has_calls=has_calls)


async def render_conversation(state: ServerState, conversation: Conversation) -> RenderedPrompt:
    """The rendered conversation alone, for counting tokens.

    Raises:
        InvalidRequestError: Names the message and the invalid field.
    """
    tool_use = check_tools(conversation.tools, conversation.tool_choice)
    return await state.engine.render(await _chat_prompt(state, conversation, tool_use))


async def _chat_prompt(state: ServerState, conversation: Conversation, tool_use: ToolUse) -> ChatPrompt:
    options = state.config.chat
    if conversation.chat_template is not None and not options.trusts_request_template:
        raise unsupported("chat_template")
    is_shown = tool_use.mode is not ToolMode.NONE or not options.excludes_unused_tools
    has_kwargs = options.template_kwargs or conversation.reasoning_effort or conversation.chat_template_kwargs
    messages = conversation.messages
    if conversation.may_name_files:
        messages = await with_stored_media(state, messages)
    return ChatPrompt(
        messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        tools=tool_use.tools if is_shown and tool_use.tools else None,
        documents=conversation.documents,
        chat_template=conversation.chat_template,
        template_kwargs=_template_kwargs(state, conversation) if has_kwargs else None,
        media_options=conversation.media_options,
        tenant=current_client.get().tenant,
    )


def _template_kwargs(state: ServerState, conversation: Conversation) -> Mapping[str, object]:
    """The arguments of the server, those for the effort, and those of the request, in this order."""
    kwargs = {**state.config.chat.template_kwargs}
    effort = conversation.reasoning_effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    return {**kwargs, **(conversation.chat_template_kwargs or {})}


async def _with_tools(
    state: ServerState, conversation: Conversation, given: GivenSampling
) -> tuple[ToolUse, CheckedSampling]:
    """The checked tools, and the sampling fields with the constraint that they require.

    The fields come first: their ranges are checked before what excludes each other.
    """
    sampling = state.engine.check_sampling(given.values, given.names)
    tool_use = _tool_use(state, conversation)
    if tool_use.mode in FORCED_MODES or tool_use.strict_names:
        # In a thread: schemas may have megabytes.
        options = constraint_options(conversation.structured_outputs)
        sampling = await in_thread(with_tool_constraint, sampling, tool_use, state.chat_parsers.tool, options)
    return tool_use, sampling


def _tool_use(state: ServerState, conversation: Conversation) -> ToolUse:
    tool_use = check_tools(conversation.tools, conversation.tool_choice, is_parallel=conversation.parallel_tool_calls)
    if tool_use.mode is ToolMode.AUTO and state.chat_parsers.tool is None:
        reason = (
            "how this model writes tool calls is not known here; the server has to be started with "
            f"--tool-call-parser, of which there are {len(TOOL_PARSERS)}"
        )
        raise request_errors.unsupported_value("tools", reason)
    return tool_use if conversation.call_grammar is None else replace(tool_use, grammar=conversation.call_grammar)


async def _plan(
    state: ServerState, conversation: Conversation, tool_use: ToolUse, prompt: RenderedPrompt
) -> tuple[CheckedSampling, ReadingPlan]:
    """The plan to parse calls and reasoning, and the sampling fields that it requires."""
    sampling, plan = prompt.sampling, await _reading_plan(state, conversation, tool_use, prompt.text)
    if plan.reasoning is not None and "structured_outputs" in sampling.values:
        sampling, plan = await in_thread(_fit_together, sampling, plan, plan.reasoning)
    if state.chat_parsers.reasoning is not None and sampling.values.get("thinking_token_budget") is not None:
        tokenizer, reasoning = await state.engine.get_tokenizer(), plan.reasoning
        sampling = sampling.with_thinking_tags(
            None
            if reasoning is None  # the constraint leaves no room for any
            else thinking_tags(tokenizer, reasoning.parser, is_open=reasoning.starts_with_reasoning)
        )
    if plan.kept_special_tokens:
        sampling = sampling.with_kept_tokens(plan.kept_special_tokens)
    return sampling, plan


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
    sampling: CheckedSampling, plan: ReadingPlan, reasoning: ReasoningPlan
) -> tuple[CheckedSampling, ReadingPlan]:
    """A constraint applies to the text after the reasoning; where it cannot, there is no reasoning."""
    constraint = sampling.values["structured_outputs"]
    if constraint is None or reasoning.is_open is False:
        return sampling, plan
    later = after_reasoning(constraint, reasoning)
    if later is None:
        return sampling, replace(plan, reasoning=None)
    return sampling.with_constraint(later, {constraint_name(later): constraint_name(constraint, sampling.names)}), plan
