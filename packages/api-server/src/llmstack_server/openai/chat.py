"""`POST /v1/chat/completions`: OpenAI's encoding of a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from llmstack_llm import request_errors
from llmstack_output_parsers import ToolCallDelta
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.deltas import ChatDelta, ChatMessage, ToolCall
from llmstack_server.chat.prepare import prepare_chat_generation
from llmstack_server.chat.stream import ChatStream
from llmstack_server.http.errors import missing_parameter
from llmstack_server.openai.common import Generation, answer_ids, check_fields
from llmstack_server.openai.events import ChunkEncoder
from llmstack_server.openai.logprobs import chat_logprobs, prompt_logprobs_object
from llmstack_server.openai.models import check_model
from llmstack_server.openai.protocol import ChatCompletionRequest, parse
from llmstack_server.openai.sampling import param_names, sampling_params
from llmstack_server.openai.unsupported import CHAT
from llmstack_server.state import ServerState
from llmstack_types import SamplingParams


async def prepare_chat(state: ServerState, body: dict[str, Any]) -> ChatAnswer:
    """Checks a request, renders its conversation and tokenizes it.

    Raises:
        InvalidRequestError: Names the first field at fault.
    """
    fields = parse(ChatCompletionRequest, body)
    if fields.messages is None:
        raise missing_parameter("messages")
    check_fields(state, body, fields, CHAT)
    ids = answer_ids("chatcmpl", fields.request_id)
    stream = await prepare_chat_generation(
        state,
        _conversation(fields),
        _params(state, fields),
        request_id=ids.engine,
        param_names=_param_names(fields),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
    )
    generation = Generation(state, fields, check_model(state, fields.model), [stream.prompt], ids)
    return ChatAnswer(generation, fields, stream)


def _conversation(fields: ChatCompletionRequest) -> Conversation:
    return Conversation(
        fields.messages or (),
        add_generation_prompt=_generation_prompt(fields),
        continue_final_message=bool(fields.continue_final_message),
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        documents=fields.documents,
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning_effort,
        include_reasoning=fields.include_reasoning is not False,
    )


def _generation_prompt(fields: ChatCompletionRequest) -> bool:
    if not fields.continue_final_message:
        return fields.add_generation_prompt is not False
    if fields.add_generation_prompt:
        reason = "it cannot be set together with 'add_generation_prompt'"
        raise request_errors.invalid_value("continue_final_message", reason)
    return False


def _param_names(fields: ChatCompletionRequest) -> dict[str, str]:
    names = param_names(fields) | {"logprobs": "top_logprobs"}
    return names if fields.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _params(state: ServerState, fields: ChatCompletionRequest) -> SamplingParams:
    if fields.top_logprobs and not fields.logprobs:
        raise request_errors.invalid_value("top_logprobs", "it is only allowed together with 'logprobs': true")
    overrides = {"logprobs": None if not fields.logprobs else fields.top_logprobs or 0}
    if fields.max_completion_tokens is not None:
        overrides["max_tokens"] = fields.max_completion_tokens
    return sampling_params(fields, state.engine.default_sampling_params(), **overrides)


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(self, generation: Generation, fields: ChatCompletionRequest, stream: ChatStream) -> None:
        self._generation = generation
        self._fields = fields
        self._stream = stream
        self._wants_tokens = bool(fields.logprobs or fields.return_token_ids)

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self._generation.is_stream

    async def whole(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        messages = await self._stream.fold()
        choices = [self._whole_choice(message) for message in messages]
        return self._generation.answer("chat.completion", choices, self._stream.usage) | self._prompt_extras()

    async def events(self) -> AsyncIterator[bytes]:
        """One chunk with the role per choice, then what is new; the last of a choice has its finish reason."""
        generation = self._generation
        encoder = generation.new_encoder("chat.completion.chunk")
        is_plain = not self._wants_tokens and not generation.includes_continuous_usage
        is_first = True
        async with aclosing(self._stream.deltas()) as deltas:
            async for delta in deltas:
                if is_first:
                    is_first = False
                    for event in self._first_events(encoder):
                        yield event
                if is_plain and delta.is_content_alone:  # by far the most
                    yield encoder.encode_content(delta.index, delta.content)
                    continue
                for event in self._events_of(delta, encoder):
                    yield event
        if generation.includes_usage:
            yield encoder.encode([], generation.end_fields(self._stream.usage))

    def _first_events(self, encoder: ChunkEncoder) -> Iterator[bytes]:
        extra = self._chunk_extra() | self._prompt_extras()
        for index in range(self._generation.n):
            yield encoder.encode([self._role_choice(index)], extra)

    def _events_of(self, delta: ChatDelta, encoder: ChunkEncoder) -> Iterator[bytes]:
        extra = self._chunk_extra()
        if delta.tool_calls and delta.finish_reason is not None:
            # The official client looks for the end of a call in a later chunk than its beginning.
            yield encoder.encode([self._chunk_choice(replace(delta, finish_reason=None))], extra)
            delta = _end_of(delta)
        if self._is_worth_sending(delta):
            end = {} if delta.finish_reason is None else self._generation.fingerprint_fields
            yield encoder.encode([self._chunk_choice(delta)], extra | end)

    def _chunk_extra(self) -> dict[str, Any]:
        return {"usage": self._stream.usage.as_object()} if self._generation.includes_continuous_usage else {}

    def _is_worth_sending(self, delta: ChatDelta) -> bool:
        has_news = delta.content or delta.reasoning or delta.tool_calls or delta.finish_reason is not None
        return bool(has_news) or self._wants_tokens

    def _chunk_choice(self, delta: ChatDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": _delta(delta),
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        return choice | self._choice_extras(delta)

    def _whole_choice(self, message: ChatMessage) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": message.index,
            "message": _message(message, self._role),
            "logprobs": self._logprobs(message),
            "finish_reason": message.finish_reason,
        }
        return choice | self._choice_extras(message)

    def _choice_extras(self, new: ChatDelta | ChatMessage) -> dict[str, Any]:
        extras: dict[str, Any] = {} if new.finish_reason is None else {"stop_reason": new.stop_reason}
        if self._fields.return_token_ids:
            extras["token_ids"] = list(new.token_ids)
        return extras

    def _prompt_extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._fields.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs_object(self._stream.prompt_logprobs)
        if self._fields.return_prompt_text:
            extras["prompt_text"] = self._stream.prompt.prompt
        if self._fields.return_token_ids:
            extras["prompt_token_ids"] = list(self._stream.prompt.prompt_token_ids)
        return extras

    def _logprobs(self, new: ChatDelta | ChatMessage) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        shows_ids = self._generation.shows_tokens_as_ids
        return chat_logprobs(new.token_ids, new.logprobs or (), self._fields.top_logprobs or 0, shows_ids=shows_ids)

    @property
    def _role(self) -> str:
        return self._generation.state.config.chat.response_role

    def _role_choice(self, index: int) -> dict[str, Any]:
        delta = {"role": self._role, "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _end_of(delta: ChatDelta) -> ChatDelta:
    logprobs = None if delta.logprobs is None else ()
    return ChatDelta(delta.index, logprobs=logprobs, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)


def _delta(delta: ChatDelta) -> dict[str, Any]:
    found: dict[str, Any] = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return found if found or delta.finish_reason is not None else {"content": ""}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """A call's id, type and name come once; clients put the pieces of its arguments together."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(message: ChatMessage, role: str) -> dict[str, Any]:
    is_all_else = not message.content and bool(message.reasoning or message.tool_calls)
    found: dict[str, Any] = {"role": role, "content": None if is_all_else else message.content, "refusal": None}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
