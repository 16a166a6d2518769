"""`POST /v1/chat/completions`: OpenAI's encoding of a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from llmstack_llm import GivenSampling, RequestOutput, request_errors
from llmstack_output_parsers import ToolCallDelta
from llmstack_server.apis.openai.answer import OpenAIAnswer
from llmstack_server.apis.openai.chunks import ChunkEncoder
from llmstack_server.apis.openai.protocol import CHAT, ChatCompletionRequest
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.deltas import ChatDelta, ChatMessage, ToolCall
from llmstack_server.chat.logprobs import chat_logprobs, prompt_logprobs_object
from llmstack_server.chat.prepare import SubmittedChat, submit_chat
from llmstack_server.chat.stream import ChatStream
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import AnswerIds, answer_ids
from llmstack_server.web.checks import check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.kv_transfer import read_kv_transfer
from llmstack_server.web.pauses import collected
from llmstack_server.web.sampling import PARAM_NAMES, given_sampling
from llmstack_server.web.sse import Events
from llmstack_types.json_values import JSONObject

_NAMES: dict[str, str] = {**PARAM_NAMES, "logprobs": "top_logprobs"}


async def prepare_chat(state: ServerState, body: dict[str, object]) -> ChatCompletion:
    """Checks a request, renders its conversation and submits it.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    fields = parse(ChatCompletionRequest, body)
    if fields.messages is None:
        raise missing_parameter("messages")
    check_fields(state, body, fields, CHAT)
    kv_transfer = None
    if fields.kv_transfer_params is not None:
        kv_transfer = read_kv_transfer(state, fields.kv_transfer_params, fields)
    ids = answer_ids("chatcmpl", fields.request_id)
    if fields.request_id is not None:
        await state.request_ids.claim(current_client.get().tenant, fields.request_id)
    given = sampling_of(fields)
    chat = await submit_chat(
        state,
        conversation_of(fields),
        given,
        request_id=ids.engine,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        model=fields.model,
        request_type="chat_completions",
        kv_transfer=kv_transfer,
    )
    return ChatCompletion(state, fields, ids, chat)


def conversation_of(fields: ChatCompletionRequest) -> Conversation:
    """The conversation of a request, unchecked but for fields that exclude each other."""
    is_continued = bool(fields.continue_final_message)
    if is_continued and fields.add_generation_prompt:
        reason = "it cannot be set together with 'add_generation_prompt'"
        raise request_errors.invalid_value("continue_final_message", reason)
    return Conversation(
        fields.messages or (),
        add_generation_prompt=not is_continued and fields.add_generation_prompt is not False,
        continue_final_message=is_continued,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        documents=fields.documents,
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        media_options=fields.mm_processor_kwargs,
        reasoning_effort=fields.reasoning_effort,
        include_reasoning=fields.include_reasoning is not False,
        structured_outputs=fields.structured_outputs,
    )


def sampling_of(fields: ChatCompletionRequest) -> GivenSampling:
    """The sampling fields of a request, and its names of them."""
    if fields.top_logprobs and not fields.logprobs:
        raise request_errors.invalid_value("top_logprobs", "it is only allowed together with 'logprobs': true")
    if fields.logprob_token_ids and not fields.logprobs:
        raise request_errors.invalid_value("logprob_token_ids", "it is only allowed together with 'logprobs': true")
    is_newer = fields.max_completion_tokens is not None
    given, names = given_sampling(fields, _NAMES | {"max_tokens": "max_completion_tokens"} if is_newer else _NAMES)
    if fields.logprobs:
        given["logprobs"] = fields.top_logprobs or 0
    if fields.max_completion_tokens is not None:
        given["max_tokens"] = fields.max_completion_tokens
    return GivenSampling(given, names)


# What clients of vLLM find in every whole answer.
_NULL_EXTRAS: JSONObject = {"prompt_logprobs": None, "prompt_token_ids": None}


class ChatCompletion(ChatStream, OpenAIAnswer):
    """The answer to one chat request."""

    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(self, state: ServerState, fields: ChatCompletionRequest, ids: AnswerIds, chat: SubmittedChat) -> None:
        ChatStream.__init__(self, chat.outputs, chat.plan)
        OpenAIAnswer.__init__(self, state, fields, ids, self.outputs, self.usage)
        self._fields = fields
        self._role = state.config.chat.response_role
        self._wants_tokens = bool(fields.logprobs or fields.return_token_ids)
        self._wants_prompt = bool(fields.return_prompt_text or fields.return_token_ids)
        # Nothing to parse and nothing to add: the chunks have text only.
        self._is_plain = chat.plan is None and not self._wants_tokens and not self.includes_continuous_usage

    async def whole(self) -> JSONObject:
        """The `chat.completion` object, with all choices."""
        choices = [await self._whole_choice(message) for message in await self.fold()]
        extras = _NULL_EXTRAS | self.transfer_fields() | self._prompt_extras()
        if self._fields.prompt_logprobs is not None:  # not of a stream
            extras["prompt_logprobs"] = await prompt_logprobs_object(self.prompt_logprobs)
        return self.answer("chat.completion", choices) | extras

    async def events(self) -> AsyncIterator[Events]:
        """One chunk with the role per choice, then new text; the last chunk of a choice has its finish reason."""
        is_first = True
        async with self.outputs as outputs:
            async for output in outputs:
                if is_first:
                    yield self._first_events(self.encoder, output)
                    is_first = False
                event = self.encode(output)
                if event:
                    yield event
        if self.sign is not None:
            yield self.encoder.encode([], self.receipt_fields())
        if self.includes_usage:
            yield self.encoder.encode([], self.end_fields())

    def encode(self, output: RequestOutput) -> Events:
        encoder = self.encoder
        if not self._is_plain or len(output.outputs) != 1:
            return [event for delta in self.read(output) for event in self._events_of(delta, encoder)]
        self.usage.add(output)
        new = output.outputs[0]  # new text alone; the last chunk of a choice says why it ended
        if new.finish_reason is None:
            return encoder.encode_content(new.index, new.text) if new.text else b""
        choice = {
            "index": new.index, "delta": {"content": new.text} if new.text else {}, "logprobs": None,
            "finish_reason": new.finish_reason, "stop_reason": new.stop_reason,
        }  # fmt: skip
        return encoder.encode([choice], self.fingerprint_fields())

    def _first_events(self, encoder: ChunkEncoder, output: RequestOutput) -> Events:
        extra = self._prompt_extras() if self._wants_prompt else {}
        if self.includes_continuous_usage:
            extra["usage"] = self.usage.sent_object(0)
        delta = {"role": self._role, "content": "", "refusal": None}
        choices = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(self.n)]
        return [encoder.encode([choice], extra) for choice in choices]

    def _events_of(self, delta: ChatDelta, encoder: ChunkEncoder) -> Iterator[bytes]:
        counts_sent = self.includes_continuous_usage
        extra = {"usage": self.usage.sent_object(len(delta.token_ids))} if counts_sent else {}
        if delta.tool_calls and delta.finish_reason is not None:
            # The official client expects the end of a call in a later chunk than its start.
            yield encoder.encode([self._chunk_choice(replace(delta, finish_reason=None))], extra)
            delta = _end_of(delta)
        has_news = delta.content or delta.reasoning or delta.tool_calls or delta.finish_reason is not None
        if has_news or self._wants_tokens:
            end = {} if delta.finish_reason is None else self.fingerprint_fields()
            yield encoder.encode([self._chunk_choice(delta)], extra | end)

    def _chunk_choice(self, delta: ChatDelta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": delta.index,
            "delta": _delta(delta),
            "logprobs": {"content": list(self._logprobs(delta)), "refusal": None} if self._fields.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        return choice | self._choice_extras(delta)

    async def _whole_choice(self, message: ChatMessage) -> dict[str, object]:
        entries = await collected(self._logprobs(message)) if self._fields.logprobs else None
        choice: dict[str, object] = {
            "index": message.index,
            "message": _message(message, self._role),
            "logprobs": None if entries is None else {"content": entries, "refusal": None},
            "finish_reason": message.finish_reason,
        }
        return choice | {"token_ids": None} | self._choice_extras(message)

    def _choice_extras(self, new: ChatDelta | ChatMessage) -> dict[str, object]:
        extras: dict[str, object] = {} if new.finish_reason is None else {"stop_reason": new.stop_reason}
        if self._fields.return_token_ids:
            extras["token_ids"] = list(new.token_ids)
        return extras

    def _prompt_extras(self) -> dict[str, object]:
        extras: dict[str, object] = {}
        if self._fields.return_prompt_text:
            extras["prompt_text"] = self.outputs.prompts[0].prompt
        if self._fields.return_token_ids:
            extras["prompt_token_ids"] = list(self.outputs.prompts[0].prompt_token_ids)
        return extras

    def _logprobs(self, new: ChatDelta | ChatMessage) -> Iterator[dict[str, object]]:
        # With `logprob_token_ids` the engine reports these and the chosen token.
        num_top = -1 if self._fields.logprob_token_ids else self._fields.top_logprobs or 0
        return chat_logprobs(new.token_ids, new.logprobs or (), num_top, shows_ids=self.shows_tokens_as_ids)


def _end_of(delta: ChatDelta) -> ChatDelta:
    logprobs = None if delta.logprobs is None else ()
    return ChatDelta(delta.index, logprobs=logprobs, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)


def _delta(delta: ChatDelta) -> dict[str, object]:
    found: dict[str, object] = {"content": delta.content} if delta.content else {}
    if delta.reasoning:
        found["reasoning_content"] = found["reasoning"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return found if found or delta.finish_reason is not None else {"content": ""}


def _call_delta(call: ToolCallDelta) -> dict[str, object]:
    """A part of a call: id, type and name are sent once, clients concatenate the arguments."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(message: ChatMessage, role: str) -> dict[str, object]:
    is_all_else = not message.content and bool(message.reasoning or message.tool_calls)
    found: dict[str, object] = {"role": role, "content": None if is_all_else else message.content, "refusal": None}
    if message.reasoning:
        found["reasoning_content"] = found["reasoning"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
