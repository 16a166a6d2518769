"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's encoding."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial

from llmstack_llm import GivenSampling, RequestOutput, request_errors
from llmstack_server.apis.anthropic.content import ContentBuilder
from llmstack_server.apis.anthropic.errors import ANTHROPIC_ERRORS
from llmstack_server.apis.anthropic.input import continues_last_message, read_messages
from llmstack_server.apis.anthropic.protocol import EFFORTS, KNOWN, CountTokensRequest, MessagesRequest, PromptFields
from llmstack_server.apis.anthropic.tools import (
    chat_tool_choice,
    chat_tools,
    structured_outputs,
    template_kwargs,
    thinking_budget,
)
from llmstack_server.chat.conversation import Conversation
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.chat.prepare import SubmittedChat, render_conversation, submit_chat
from llmstack_server.chat.stream import ChatStream
from llmstack_server.chat.turns import in_words_of_api
from llmstack_server.observability.logs import current_request_id
from llmstack_server.state.answer_source import lasting
from llmstack_server.state.server_state import ServerState, Sign
from llmstack_server.web.answers import Answer, Push, WholeAnswer
from llmstack_server.web.checks import check_fields
from llmstack_server.web.errors import ErrorAnswer, missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.sampling import PARAM_NAMES, given_sampling
from llmstack_server.web.sse import Events, frame_named
from llmstack_server.web.structured import with_form
from llmstack_server.web.unsupported import check_word
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject

MAX_TEMPERATURE = 1.0

_NAMES = {**PARAM_NAMES, "stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
_FORM_NAMES = {
    "structured_outputs": "output_config.format", "structured_outputs.json": "output_config.format.schema",
}  # fmt: skip
_TOOL_NAMES = {".function.parameters": ".input_schema", ".function": ""}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


async def prepare_messages(state: ServerState, body: dict[str, object]) -> MessagesAnswer:
    """Checks a request, renders its conversation and tokenizes it.

    Raises:
        InvalidRequestError: Names the first invalid field.
    """
    fields = parse(MessagesRequest, body)
    conversation = _conversation(fields)
    check_fields(state, body, fields, KNOWN)
    _check(fields)
    message_id = lasting(f"msg_{uuid.uuid4().hex}")
    given = _sampling(fields, has_reasoning=state.chat_parsers.reasoning is not None)
    try:
        chat = await submit_chat(
            state,
            conversation,
            given,
            request_id=message_id,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            model=fields.model,
        )
    except InvalidRequestError as error:
        raise in_words_of_api(error, "messages", _TOOL_NAMES, conversation.messages) from None
    sign = None
    if state.receipts is not None:
        outputs, sign = state.receipts.note(state, chat.outputs)
        chat = chat._replace(outputs=outputs)
    return MessagesAnswer(message_id, fields.model or state.served_model_name, fields, chat, sign)


async def prepare_count(state: ServerState, body: dict[str, object]) -> CountAnswer:
    """Counts the prompt tokens of the same request; raises as `prepare_messages`."""
    fields = parse(CountTokensRequest, body)
    conversation = _conversation(fields)
    check_fields(state, body, fields, KNOWN)
    try:
        rendered = await render_conversation(state, conversation)
    except InvalidRequestError as error:
        raise in_words_of_api(error, "messages", _TOOL_NAMES, conversation.messages) from None
    return CountAnswer(len(rendered.token_ids))


def _conversation(fields: PromptFields) -> Conversation:
    effort = fields.output_config.effort if fields.output_config else None
    check_word("output_config.effort", effort, EFFORTS)
    messages = read_messages(fields.system, fields.messages)
    choice, is_parallel = chat_tool_choice(fields.tool_choice)
    is_continued = continues_last_message(messages)
    return Conversation(
        messages,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        tools=chat_tools(fields.tools) or None,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        chat_template_kwargs={**template_kwargs(fields.thinking), **(fields.chat_template_kwargs or {})},
        reasoning_effort=effort,
        may_name_files=True,
        structured_outputs=fields.structured_outputs if isinstance(fields, MessagesRequest) else None,
    )


def _check(fields: MessagesRequest) -> None:
    if fields.max_tokens is None:
        raise missing_parameter("max_tokens")
    if fields.temperature is not None and fields.temperature > MAX_TEMPERATURE:
        raise request_errors.above_max("temperature", MAX_TEMPERATURE, fields.temperature, is_integer=False)


def _sampling(fields: MessagesRequest, *, has_reasoning: bool) -> GivenSampling:
    """The sampling fields, and their names in this request; a budget counts where the model `has_reasoning`."""
    given, names = given_sampling(fields, _NAMES)
    if has_reasoning and (budget := thinking_budget(fields.thinking)) is not None:
        given["thinking_token_budget"] = budget
    if fields.stop_sequences is not None:
        given["stop"] = fields.stop_sequences
    form = structured_outputs(fields.output_config.format if fields.output_config else None)
    return with_form(GivenSampling(given, names), form, fields, _FORM_NAMES)


class CountAnswer(WholeAnswer):
    """The number of tokens of a prompt."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def whole(self) -> JSONObject:
        """The object with `input_tokens`."""
        return {"input_tokens": self._num_tokens}


class MessagesAnswer(ChatStream, Answer):
    """The answer to one request for a message.

    Attributes:
        end: Empty, since no marker follows the last event.
    """

    end = b""

    def __init__(
        self, message_id: str, model: str, fields: MessagesRequest, chat: SubmittedChat, sign: Sign | None
    ) -> None:
        super().__init__(chat.outputs, chat.plan)
        self._sign = sign
        self._created = lasting(int(time.time()))
        self._id = message_id
        self._model = model
        self._fields = fields
        self.is_stream = bool(fields.stream)
        self._content = ContentBuilder(hides_thinking=(fields.thinking or {}).get("display") == "omitted")
        self._last: ChatDelta | None = None

    async def whole(self) -> JSONObject:
        """The `message` object, with all content blocks."""
        async with self.outputs as outputs:
            async for output in outputs:
                for delta in self.read(output):
                    self._last = delta
                    for _ in self._content.add(delta):
                        pass
        for _ in self._content.finish():
            pass
        return self._message(self._content.blocks(), self._stop()) | self._receipt_fields()

    async def events(self) -> AsyncIterator[Events]:
        """The events from `message_start` to `message_stop`."""
        async with self.outputs as outputs:
            async for output in outputs:
                events = self.encode(output)
                if events:
                    yield events
        for event in (*self._content.finish(), *self._closing()):
            yield frame_named(event)

    def encode(self, output: RequestOutput) -> Events:
        """The events of one output; empty while its text is withheld."""
        return [frame_named(event) for delta in self.read(output) for event in self._events_of(delta)]

    def _events_of(self, delta: ChatDelta) -> Iterator[dict[str, object]]:
        if self._last is None:
            yield {"type": "message_start", "message": self._message([], _NOT_STOPPED)}
        self._last = delta
        yield from self._content.add(delta)

    def push_by(self, push: Push) -> None:
        """Each output is encoded and sent as it comes."""
        self.outputs.follow(partial(push, self.encode))

    def error_event(self, error: ErrorAnswer) -> bytes:
        """The last event of a stream that failed."""
        return ANTHROPIC_ERRORS.last_event(error, current_request_id.get(), 0)

    def _closing(self) -> Iterator[dict[str, object]]:
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage(), **self._receipt_fields()}
        yield {"type": "message_stop"}

    def _receipt_fields(self) -> dict[str, object]:
        """`receipt` for the end of the message, where the server signs them."""
        return {} if self._sign is None else {"receipt": self._sign(self._id, self._model, self._created)}

    def _message(self, blocks: list[dict[str, object]], stop: dict[str, object]) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **stop,
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, object]:
        """The stop reason, and the stop sequence that was found, if any."""
        last = self._last
        if last is None or last.finish_reason is None:
            return _NOT_STOPPED
        if last.finish_reason == "stop" and isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = _STOP_REASONS.get(last.finish_reason, "tool_use" if self._content.has_calls else "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, object]:
        """The `usage` object, where tokens from the prefix cache are counted separately."""
        counts = self.usage.as_object()
        media = dict(counts["prompt_tokens_details"])
        num_cached = media.pop("cached_tokens")
        return {
            "input_tokens": counts["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counts["completion_tokens"],
            **media,
        }


_NOT_STOPPED: JSONObject = {"stop_reason": None, "stop_sequence": None}
