"""Everything that `/v1/responses` does for one server: create, fetch, cancel, delete, list inputs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from llmstack_llm import request_errors
from llmstack_server.http.errors import ErrorAnswer, HTTPError
from llmstack_server.openai.events import encode_json, frame_named
from llmstack_server.responses.background import BackgroundResponse, new_background_response
from llmstack_server.responses.input_list import ListQuery, item_page
from llmstack_server.responses.prepare import PreparedResponse, count_input_tokens, prepare_response
from llmstack_server.responses.store import ResponseStore, StoredResponse, encode
from llmstack_server.state import ServerState


class ResponsesService:
    """The responses of one server: those in its store, and those that are generated in the background."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self.store = store
        self._state = state
        self._running: dict[str, BackgroundResponse] = {}

    async def prepare(self, state: ServerState, body: dict[str, Any]) -> ResponseAnswer | BackgroundAnswer:
        """Checks a request; raises InvalidRequestError."""
        prepared = await prepare_response(state, self.store, body)
        if prepared.fields.background:
            return BackgroundAnswer(self, prepared)
        return ResponseAnswer(self.store, prepared)

    async def prepare_count(self, state: ServerState, body: dict[str, Any]) -> CountAnswer:
        """Counts what a response to the same body would read; raises InvalidRequestError."""
        return CountAnswer(await count_input_tokens(state, self.store, body))

    def start(self, prepared: PreparedResponse) -> BackgroundResponse:
        """Lets a response be generated in the background.

        Raises:
            ServerOverloadedError: The store is full of running ones.
        """
        stored = StoredResponse(prepared.run.response.id, prepared.input_items, is_background=True, is_running=True)
        running = new_background_response(self._state, self.store, prepared.run, stored)
        running.start(lambda: self._running.pop(stored.id, None))
        self._running[stored.id] = running
        return running

    def fetch(self, response_id: str) -> bytes:
        """The response as JSON, as far as it has come; raises HTTPError 404."""
        stored = self._find(response_id)
        if not stored.is_running:
            return stored.data
        return encode_json(self._running[response_id].run.as_object()).encode("utf-8", "replace")

    def follow(self, response_id: str, starting_after: int | None) -> AsyncIterator[bytes]:
        """The events of a response that was created in the background and as a stream.

        Raises:
            HTTPError: 404.
            InvalidRequestError: It was created in another way.
        """
        events = self._find(response_id).events
        if events is None:
            reason = "this response was not created with 'background': true and 'stream': true"
            raise request_errors.invalid_value("stream", reason)
        return events.follow(0 if starting_after is None else starting_after + 1)

    async def cancel(self, response_id: str) -> bytes:
        """Ends a response of the background; one that has ended stays as it is.

        Raises:
            HTTPError: 404.
            InvalidRequestError: Its client waits for it, and ends it by leaving.
        """
        stored = self._find(response_id)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        elif not stored.is_background:
            raise request_errors.invalid_value("response_id", "only responses of the background can be cancelled")
        return stored.data

    async def delete(self, response_id: str) -> dict[str, Any]:
        """Forgets a response, and ends it first; raises HTTPError 404."""
        stored = self._find(response_id)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        self.store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def input_items(self, response_id: str, query: ListQuery) -> dict[str, Any]:
        """A page of what the model read; raises HTTPError 404, InvalidRequestError."""
        return item_page(self._find(response_id).input_items, query)

    def _find(self, response_id: str) -> StoredResponse:
        stored = self.store.get(response_id)
        if stored is None:
            message = f"Response with id '{request_errors.echo(response_id)}' not found."
            raise HTTPError(ErrorAnswer(404, "invalid_request_error", "response_not_found", message, "response_id"))
        return stored


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
        """`response.failed`, where what has begun cannot go on."""
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

    def __init__(self, service: ResponsesService, prepared: PreparedResponse) -> None:
        self._service = service
        self._prepared = prepared

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self._prepared.fields.stream)

    async def whole(self) -> bytes:
        """The response object, queued."""
        data = encode_json(self._prepared.run.as_object()).encode("utf-8", "replace")
        self._service.start(self._prepared)
        return data

    async def events(self) -> AsyncIterator[bytes]:
        """What it logs, from the beginning."""
        log = self._service.start(self._prepared).stored.events
        if log is not None:
            async for event in log.follow():
                yield event

    def error_event(self, error: ErrorAnswer) -> bytes:
        """Nothing: the log says how it ended."""
        return b""
