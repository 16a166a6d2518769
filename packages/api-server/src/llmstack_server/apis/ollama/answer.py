"""Answers in Ollama's form: one object, or lines of them."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator

from llmstack_llm import RequestMetrics
from llmstack_llm.chat.tool_calls import argument_object
from llmstack_server.apis.ollama.errors import OLLAMA_ERRORS, json_line
from llmstack_server.apis.ollama.names import Fields
from llmstack_server.apis.ollama.protocol import AnswerRequest
from llmstack_server.chat.deltas import ChatDelta, ChatMessage, ToolCall, fold
from llmstack_server.chat.logprobs import chat_logprobs
from llmstack_server.chat.prepare import SubmittedChat
from llmstack_server.chat.stream import ChatStream
from llmstack_server.observability.logs import current_request_id
from llmstack_server.web.answers import Answer, WholeAnswer
from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.pauses import collected

_NS_PER_S = 1_000_000_000


class LineAnswer(ChatStream, Answer):
    """The answer to one request; a stream is lines of objects, of which the last one counts tokens and times."""

    end = b""
    stream_type = "application/x-ndjson"
    comment = b""

    def __init__(self, model: str, chat: SubmittedChat, fields: AnswerRequest) -> None:
        super().__init__(chat.outputs, chat.plan)
        self._model = model
        self._num_top = fields.top_logprobs or 0 if fields.logprobs else None
        self.is_stream = fields.stream is not False

    @abstractmethod
    def part(self, content: str, thinking: str = "", calls: list[Fields] | None = None) -> Fields:
        """New text, reasoning and whole calls in the form of the route."""

    async def whole(self) -> Fields:
        """The object with all text."""
        [message] = await self.fold()
        part = self.part(message.content, message.reasoning, list(map(_call_object, message.tool_calls)))
        logprobs = _field_of(await collected(self._logprobs(message)))
        return {**self._head(), **part, **logprobs, **self._end(message.finish_reason)}

    async def events(self) -> AsyncIterator[bytes]:
        """A line per new text; calls come whole, before the last line. Tokens without text are in the next line."""
        with_calls: list[ChatDelta] = []
        logprobs: list[Fields] = []
        reason: str | None = None
        async with self.outputs as outputs:
            async for output in outputs:
                for delta in self.read(output):
                    reason = delta.finish_reason
                    logprobs += self._logprobs(delta)
                    if delta.tool_calls:
                        with_calls.append(delta)
                    if delta.content or delta.reasoning:
                        yield self._line({**self.part(delta.content, delta.reasoning), **_field_of(logprobs)})
                        logprobs = []
        if with_calls:
            calls = [_call_object(call) for message in fold(with_calls) for call in message.tool_calls]
            yield self._line(self.part("", calls=calls))
        yield json_line({**self._head(), **self.part(""), **_field_of(logprobs), **self._end(reason)})

    def error_event(self, error: ErrorAnswer) -> bytes:
        """The last line of a stream that failed."""
        return OLLAMA_ERRORS.last_event(error, current_request_id.get(), 0)

    def _logprobs(self, new: ChatDelta | ChatMessage) -> Iterator[Fields]:
        if self._num_top is None:
            return iter(())
        return chat_logprobs(new.token_ids, new.logprobs or (), self._num_top)

    def _line(self, part: Fields) -> bytes:
        return json_line({**self._head(), **part, "done": False})

    def _head(self) -> Fields:
        return {"model": self._model, "created_at": now_text()}

    def _end(self, finish_reason: str | None) -> Fields:
        # A call ends an answer there as any text does.
        reason = "length" if finish_reason == "length" else "stop"
        counts = {"prompt_eval_count": self.usage.num_prompt_tokens, "eval_count": self.usage.num_completion_tokens}
        return {"done": True, "done_reason": reason, **_durations(self.usage.timings), **counts}


class ChatAnswer(LineAnswer):
    """The answer of `/api/chat`."""

    def part(self, content: str, thinking: str = "", calls: list[Fields] | None = None) -> Fields:
        """The `message` of the assistant, with what is new in it."""
        message: Fields = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateAnswer(LineAnswer):
    """The answer of `/api/generate`."""

    def part(self, content: str, thinking: str = "", calls: list[Fields] | None = None) -> Fields:
        """The `response`; this route has no tools."""
        return {"response": content, "thinking": thinking} if thinking else {"response": content}


class LoadedAnswer(WholeAnswer):
    """The answer to a request without a prompt, which only loads the model, or lets it sleep."""

    def __init__(self, model: str, part: Fields, *, is_last: bool = False) -> None:
        """`is_last`: Whether the model sleeps after it."""
        self._model = model
        self._part = part
        self._reason = "unload" if is_last else "load"

    async def whole(self) -> Fields:
        """The object without text."""
        return {
            "model": self._model, "created_at": now_text(), **self._part, "done": True, "done_reason": self._reason,
        }  # fmt: skip


def now_text() -> str:
    """The time in UTC, such as `2026-11-30T12:00:00.123456Z`."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _field_of(logprobs: list[Fields]) -> Fields:
    return {"logprobs": logprobs} if logprobs else {}


def _call_object(call: ToolCall) -> Fields:
    """A call, whose arguments are an object; text that is none stands under a key of its own."""
    return {"id": call.id, "function": {"name": call.name, "arguments": argument_object(call.arguments)}}


def _durations(timings: RequestMetrics | None) -> dict[str, int]:
    """Nanoseconds of the whole, of the prompt and of the answer; those that are not known are 0."""
    if timings is None:
        return dict.fromkeys(("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"), 0)
    first_s, last_s = timings.first_token_time_s, timings.last_token_time_s
    return {
        "total_duration": _ns(timings.arrival_time_s, last_s),
        "load_duration": 0,
        "prompt_eval_duration": _ns(timings.scheduled_time_s, first_s),
        "eval_duration": _ns(first_s, last_s),
    }


def _ns(start_s: float | None, end_s: float | None) -> int:
    return 0 if start_s is None or end_s is None else round((end_s - start_s) * _NS_PER_S)
