"""The run of one response: deltas in, events of the API out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator

from llmstack_llm import RequestOutput
from llmstack_server.apis.responses.custom_tools import custom_names
from llmstack_server.apis.responses.objects import ResponseObject
from llmstack_server.apis.responses.output_items import Event, OutputBuilder
from llmstack_server.apis.responses.store import Item
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.chat.logprobs import chat_logprobs
from llmstack_server.chat.prepare import SubmittedChat
from llmstack_server.chat.stream import ChatStream
from llmstack_server.state.server_state import Sign
from llmstack_server.web.errors import ErrorAnswer
from llmstack_types.json_values import JSONObject

NumberedEvent = JSONObject


class ResponseRun(ChatStream):
    """One response from its first event to its last; `events` may be called once.

    Attributes:
        response: The object without its output.
    """

    def __init__(
        self,
        chat: SubmittedChat,
        response: ResponseObject,
        *,
        shows_ids: bool = False,
        sign: Sign | None = None,
    ) -> None:
        """With `shows_ids`, the tokens of log-probabilities are `token_id:N`.

        `sign`: Makes the receipt, where the server signs one.
        """
        super().__init__(chat.outputs, chat.plan)
        self._sign = sign
        self._receipt: dict[str, object] | None = None
        self.response = response
        self._shows_ids = shows_ids
        # A call under a grammar is its text; other models write it as an argument.
        has_grammar = chat.plan is not None and chat.plan.tool_use.grammar is not None
        self._output = OutputBuilder(custom_names(response.fields.tools), has_arguments=not has_grammar)
        self._num_events = 0
        self._finish_reason: str | None = None
        self._pending_logprobs: list[dict[str, object]] = []

    def output_items(self) -> list[Item]:
        """The output items so far."""
        return self._output.items("incomplete" if self.response.is_over else "in_progress")

    def as_object(self) -> JSONObject:
        """The current response object; it has token counts once it has ended."""
        usage = self.usage if self.response.is_over else None
        found = self.response.as_object(self.output_items(), usage)
        return found if self._receipt is None else found | {"receipt": self._receipt}

    async def events(self) -> AsyncGenerator[NumberedEvent, None]:
        """All events; those of a response in the background start before the first token.

        Raises:
            ServerOverloadedError, RequestFailedError, EngineDeadError: As of its outputs.
        """
        for event in self._opening(is_early=bool(self.response.fields.background)):
            yield event
        async with self.outputs as outputs:
            async for output in outputs:
                for event in self.events_of(output):
                    yield event
        for event in self._finish("incomplete" if self._finish_reason == "length" else "completed"):
            yield event

    def events_of(self, output: RequestOutput) -> Iterator[NumberedEvent]:
        """The events of one output, which may come while the next of `events` is awaited."""
        for delta in self.read(output):
            yield from self._opening()
            yield from map(self._numbered, self._add(delta))
            self._finish_reason = delta.finish_reason or self._finish_reason

    def fail(self, error: ErrorAnswer) -> NumberedEvent:
        """The last event of a failed response."""
        self.response.error = error
        self.response.complete("failed")
        return self._snapshot("response.failed")

    def cancel(self) -> None:
        """Sets the status `cancelled`."""
        self.response.complete("cancelled")

    def _opening(self, *, is_early: bool = True) -> Iterator[NumberedEvent]:
        """The events before all output, sent after the first token so that an early error has its own status."""
        if not is_early or self._num_events:
            return
        is_queued = self.response.status == "queued"
        yield self._snapshot("response.created")
        if is_queued:
            yield self._snapshot("response.queued")
        self.response.status = "in_progress"
        yield self._snapshot("response.in_progress")

    def _add(self, delta: ChatDelta) -> Iterator[Event]:
        if not self.response.fields.has_logprobs:
            return self._output.add(delta)
        num_top = self.response.fields.top_logprobs or 0
        self._pending_logprobs += chat_logprobs(
            delta.token_ids, delta.logprobs or (), num_top, shows_ids=self._shows_ids
        )
        is_other = bool(delta.reasoning or delta.tool_calls)
        if not (delta.content or is_other or delta.finish_reason is not None):
            return iter(())  # the text of these tokens comes later
        pending, self._pending_logprobs = self._pending_logprobs, []
        return self._output.add(delta, pending if delta.content or not is_other else ())

    def _finish(self, status: str) -> Iterator[NumberedEvent]:
        yield from self._opening()
        yield from map(self._numbered, self._output.finish(status))
        self.response.complete(status)
        if self._sign is not None:
            self._receipt = self._sign(self.response.id, self.response.model, self.response.created_at)
        yield self._snapshot(f"response.{status}")

    def _snapshot(self, kind: str) -> NumberedEvent:
        return self._numbered((kind, {"response": self.as_object()}))

    def _numbered(self, event: Event) -> NumberedEvent:
        kind, fields = event
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **fields}
