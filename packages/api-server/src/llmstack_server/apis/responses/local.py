"""Responses of one process: stored ones, and those in the background."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_server.apis.responses.background import BackgroundResponse, new_background_response
from llmstack_server.apis.responses.run import ResponseRun
from llmstack_server.apis.responses.store import Item, ResponseStore, StoredItem, StoredResponse
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import HTTPError, error_answer
from llmstack_server.web.sse import encode_json

NOT_FOUND = "not_found"


class LocalResponses:
    """Responses by id and owner; an unknown or foreign id raises HTTPError 404."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self.store = store
        self._state = state
        self._running: dict[str, BackgroundResponse] = {}

    def start(self, run: ResponseRun, owner: str, input_items: tuple[StoredItem, ...]) -> StoredResponse:
        """Starts a response in the background.

        Raises:
            ServerOverloadedError: The store is full of running responses.
        """
        stored = StoredResponse(run.response.id, owner, input_items, is_background=True, is_running=True)
        running = new_background_response(self._state, self.store, run, stored)
        running.start(lambda: self._running.pop(stored.id, None))
        self._running[stored.id] = running
        return stored

    async def fetch(self, response_id: str, owner: str) -> bytes:
        """The current state of a response, as JSON."""
        stored = self._find(response_id, owner)
        if not stored.is_running:
            return stored.data
        return encode_json(self._running[response_id].run.as_object()).encode("utf-8", "replace")

    async def read_events(self, response_id: str, owner: str, start: int) -> tuple[list[bytes], bool]:
        """The next events of a streamed response in the background, and whether they are the last.

        Raises:
            InvalidRequestError: The response was not created in the background and as a stream.
        """
        events = self._find(response_id, owner).events
        if events is None:
            reason = "this response was not created with 'background': true and 'stream': true"
            raise request_errors.invalid_value("stream", reason)
        return await events.read(start)

    async def cancel(self, response_id: str, owner: str) -> bytes:
        """Cancels a response in the background; one that has ended is unchanged.

        Raises:
            InvalidRequestError: The response runs in the foreground; closing its connection cancels it.
        """
        stored = self._find(response_id, owner)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        elif not stored.is_background:
            raise request_errors.invalid_value("response_id", "only responses in the background can be cancelled")
        return stored.data

    async def delete(self, response_id: str, owner: str) -> None:
        """Deletes a response, and cancels it first if it runs."""
        stored = self._find(response_id, owner)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        self.store.remove(response_id)

    async def input_items(self, response_id: str, owner: str) -> tuple[StoredItem, ...]:
        """The input items of a response."""
        return self._find(response_id, owner).input_items

    async def all_items(self, response_id: str, owner: str) -> tuple[StoredItem, ...]:
        """The input and output items of a response.

        Raises:
            InvalidRequestError: The response has not ended yet.
        """
        stored = self._find(response_id, owner)
        if stored.is_running:
            raise request_errors.invalid_value("previous_response_id", "that response has not ended yet")
        return stored.input_items + stored.output_items

    async def find_item(self, item_id: str, owner: str) -> Item | None:
        """An input or output item of any response of the owner."""
        return self.store.find_item(item_id, owner)

    def _find(self, response_id: str, owner: str) -> StoredResponse:
        stored = self.store.get(response_id, owner)
        if stored is None:
            raise response_not_found()
        return stored


def response_not_found(param: str = "response_id") -> HTTPError:
    """The error for an id that was never used, is evicted, lost with its process, or another key's: all look alike."""
    return HTTPError(error_answer(NOT_FOUND, "There is no response with this id.", param))
