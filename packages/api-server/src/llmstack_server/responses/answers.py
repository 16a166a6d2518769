"""The answers to requests for a response: whole, as a stream, or going on in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from llmstack_server.http.errors import ErrorAnswer
from llmstack_server.openai.events import encode_json, frame_named
from llmstack_server.responses.prepare import PreparedResponse, count_input_tokens, prepare_response
from llmstack_server.responses.shared import SharedResponses
from llmstack_server.responses.store import ResponseStore, StoredResponse, encode
from llmstack_server.state import ServerState


class ResponsesService:
    """What is asked of the responses of one server."""

    def __init__(self, responses: SharedResponses) -> None:
        self._responses = responses

    async def prepare(self, state: ServerState, body: dict[str, Any]) -> ResponseAnswer | BackgroundAnswer:
        """Checks a request; raises InvalidRequestError."""
        prepared = await prepare_response(state, self._responses, body)
        if prepared.fields.background:
            return BackgroundAnswer(self._responses, prepared)
        return ResponseAnswer(self._responses.local.store, prepared)

    async def prepare_count(self, state: ServerState, body: dict[str, Any]) -> CountAnswer:
        """Counts what a response to the same body would read; raises InvalidRequestError."""
        return CountAnswer(await count_input_tokens(state, self._responses, body))


class CountAnswer:
    """How many tokens a model would read."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def whole(self) -> dict[str, Any]:
        """The object of the API."""
        return {"object": "response.input_tokens", "input_tokens": self._num_tokens}


class ResponseAnswer:
    """A response whose client waits for it; it is stored at its end."""

    end = b""

    def __init__(self, store: ResponseStore, prepared: PreparedResponse) -> None:
        self._store = store
        self._prepared = prepared

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self._prepared.fields.stream)

    async def whole(self) -> bytes:
        """The response object."""
        async with aclosing(self._prepared.run.events()) as events:
            async for _ in events:
                pass
        return self._keep()

    async def events(self) -> AsyncIterator[bytes]:
        """From `response.created` to `response.completed` or `response.incomplete`."""
        run = self._prepared.run
        async with aclosing(run.events()) as events:
            async for event in events:
                if run.response.is_over:
                    self._keep()  # before its client can ask for it
                yield frame_named(event)

    def error_event(self, error: ErrorAnswer) -> bytes:
        """`response.failed`, where what has begun cannot go on; nothing where its last event is out."""
        if self._prepared.run.response.is_over:
            return b""
        event = frame_named(self._prepared.run.fail(error))
        self._keep()
        return event

    def _keep(self) -> bytes:
        run = self._prepared.run
        data = encode_json(run.as_object()).encode("utf-8", "replace")
        if run.response.is_stored:
            items = tuple(encode(item) for item in run.output_items())
            self._store.put(StoredResponse(run.response.id, self._prepared.input_items, items, data))
        return data


class BackgroundAnswer:
    """A response that goes on without its client, who gets it as it is now or as a stream."""

    end = b""

    def __init__(self, responses: SharedResponses, prepared: PreparedResponse) -> None:
        self._responses = responses
        self._prepared = prepared

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self._prepared.fields.stream)

    async def whole(self) -> bytes:
        """The response object, queued."""
        data = encode_json(self._prepared.run.as_object()).encode("utf-8", "replace")
        self._start()
        return data

    async def events(self) -> AsyncIterator[bytes]:
        """What it logs, from the beginning."""
        self._start()
        async for event in await self._responses.follow(self._prepared.run.response.id):
            yield event

    def error_event(self, error: ErrorAnswer) -> bytes:
        """Nothing: the log says how it ended."""
        return b""

    def _start(self) -> None:
        self._responses.local.start(self._prepared.run, self._prepared.input_items)
