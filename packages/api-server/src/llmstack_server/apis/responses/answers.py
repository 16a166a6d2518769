"""Answers of the Responses API: whole, as a stream, or in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from llmstack_llm import RequestOutput
from llmstack_server.apis.responses.compaction import CompactionAnswer
from llmstack_server.apis.responses.local import LocalResponses
from llmstack_server.apis.responses.prepare import (
    PreparedResponse,
    count_input_tokens,
    prepare_compaction,
    prepare_response,
)
from llmstack_server.apis.responses.run import NumberedEvent
from llmstack_server.apis.responses.shared import SharedResponses
from llmstack_server.apis.responses.store import StoredItem, StoredResponse, encode
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import Answer, Push, WholeAnswer
from llmstack_server.web.errors import ErrorAnswer, HTTPError
from llmstack_server.web.pauses import encoded
from llmstack_server.web.sse import Events, encode_json, frame_named


class ResponsesService:
    """Prepares the requests of `/v1/responses`."""

    def __init__(self, responses: SharedResponses) -> None:
        self._responses = responses

    async def prepare(self, state: ServerState, body: dict[str, object]) -> ResponseAnswer | BackgroundAnswer:
        """Checks a request; raises InvalidRequestError."""
        prepared = await prepare_response(state, self._responses, body)
        if prepared.fields.background:
            return BackgroundAnswer(self._responses, prepared)
        return ResponseAnswer(self._responses.local, prepared)

    async def prepare_compaction(self, state: ServerState, body: dict[str, object]) -> CompactionAnswer:
        """Submits a conversation to be summarized; raises InvalidRequestError."""
        return await prepare_compaction(state, self._responses, body)

    async def prepare_count(self, state: ServerState, body: dict[str, object]) -> CountAnswer:
        """Prepares a count of the input tokens of a body; raises InvalidRequestError."""
        return CountAnswer(await count_input_tokens(state, self._responses, body))


class CountAnswer(WholeAnswer):
    """The number of input tokens of a request."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def whole(self) -> dict[str, object]:
        return {"object": "response.input_tokens", "input_tokens": self._num_tokens}


class _RunAnswer(Answer):
    """The answer that a run makes; its last event is the end."""

    end = b""

    def __init__(self, prepared: PreparedResponse) -> None:
        self.is_stream = bool(prepared.fields.stream)
        self._prepared = prepared

    @property
    def is_failed(self) -> bool:
        """Whether the response has failed."""
        return self._prepared.run.response.status == "failed"


class ResponseAnswer(_RunAnswer):
    """A response in the foreground, which is stored at its end."""

    def __init__(self, local: LocalResponses, prepared: PreparedResponse) -> None:
        super().__init__(prepared)
        self.outputs = prepared.run.outputs
        self._local = local

    async def whole(self) -> list[bytes]:
        """The response object after its end."""
        async with aclosing(self._prepared.run.events()) as events:
            async for _ in events:
                pass
        return await self._keep()

    async def events(self) -> AsyncIterator[bytes]:
        """The events from `response.created` to `response.completed` or `response.incomplete`."""
        run = self._prepared.run
        async with aclosing(run.events()) as events:
            async for event in events:
                yield await _framed(await self._kept_end(event) if run.response.is_over else event)

    def encode(self, output: RequestOutput) -> Events:
        """The events of one output; empty while its text is withheld."""
        return list(map(frame_named, self._prepared.run.events_of(output)))

    def push_by(self, push: Push) -> None:
        """Each output is encoded and sent as it comes."""
        self.outputs.follow(partial(push, self.encode))

    def error_event(self, error: ErrorAnswer) -> bytes:
        """`response.failed` where a started response cannot continue; nothing after its last event."""
        if self._prepared.run.response.is_over:
            return b""
        event = frame_named(self._prepared.run.fail(error))
        if self._prepared.run.response.is_stored:
            run = self._prepared.run
            data = encode_json(run.as_object()).encode("utf-8", "replace")
            self._local.store.put(self._stored(tuple(map(encode, run.output_items())), data))
        return event

    async def _kept_end(self, event: NumberedEvent) -> NumberedEvent:
        """The last event, once the response is kept: before the client can request it; else one that says why not."""
        try:
            await self._keep()
        except HTTPError as error:
            failed = self._prepared.run.fail(error.answer)
            return {**failed, "sequence_number": event["sequence_number"]}
        return event

    async def _keep(self) -> list[bytes]:
        run = self._prepared.run
        parts = await encoded(run.as_object())
        if run.response.is_stored:
            items = [StoredItem(item["id"], b"".join(await encoded(item))) for item in run.output_items()]
            await self._local.keep(self._stored(tuple(items), b"".join(parts)))
        return parts

    def _stored(self, items: tuple[StoredItem, ...], data: bytes) -> StoredResponse:
        prepared = self._prepared
        return StoredResponse(prepared.run.response.id, prepared.owner, prepared.input_items, items, data)


class BackgroundAnswer(_RunAnswer):
    """A response in the background; the client receives its current state, or a stream."""

    def __init__(self, responses: SharedResponses, prepared: PreparedResponse) -> None:
        super().__init__(prepared)
        self._responses = responses

    async def whole(self) -> bytes:
        """The response object with the status `queued`."""
        data = encode_json(self._prepared.run.as_object()).encode("utf-8", "replace")
        await self._start()
        return data

    async def events(self) -> AsyncIterator[bytes]:
        """The events of its log, from the first on."""
        await self._start()
        async for event in await self._responses.follow(self._prepared.run.response.id):
            yield event

    def error_event(self, error: ErrorAnswer) -> bytes:
        """Nothing, since the last event in the log is its end."""
        return b""

    async def _start(self) -> None:
        prepared = self._prepared
        local = self._responses.local
        await local.start(prepared.run, prepared.owner, prepared.input_items, prepared.request, prepared.source)


async def _framed(event: NumberedEvent) -> bytes:
    """`frame_named`, in pieces: the last events have the log-probabilities of the whole text."""
    return b"".join((b"event: %s\ndata: " % str(event["type"]).encode(), *await encoded(event), b"\n\n"))
