"""The responses of one process: those in its store, and those that are generated in the background."""

from __future__ import annotations

from llmstack_llm import request_errors
from llmstack_server.http.errors import INVALID_REQUEST, ErrorAnswer, HTTPError
from llmstack_server.openai.events import encode_json
from llmstack_server.responses.background import BackgroundResponse, new_background_response
from llmstack_server.responses.run import ResponseRun
from llmstack_server.responses.store import Item, ResponseStore, StoredItem, StoredResponse
from llmstack_server.state import ServerState

NOT_FOUND = "response_not_found"


class LocalResponses:
    """Responses by id; what is not there is answered with HTTPError 404."""

    def __init__(self, state: ServerState, store: ResponseStore) -> None:
        self.store = store
        self._state = state
        self._running: dict[str, BackgroundResponse] = {}

    def start(self, run: ResponseRun, input_items: tuple[StoredItem, ...]) -> StoredResponse:
        """Lets a response be generated in the background.

        Raises:
            ServerOverloadedError: The store is full of running ones.
        """
        stored = StoredResponse(run.response.id, input_items, is_background=True, is_running=True)
        running = new_background_response(self._state, self.store, run, stored)
        running.start(lambda: self._running.pop(stored.id, None))
        self._running[stored.id] = running
        return stored

    async def fetch(self, response_id: str) -> bytes:
        """The response as JSON, as far as it has come."""
        stored = self._find(response_id)
        if not stored.is_running:
            return stored.data
        return encode_json(self._running[response_id].run.as_object()).encode("utf-8", "replace")

    async def read_events(self, response_id: str, start: int) -> tuple[list[bytes], bool]:
        """The next events of a response that was created in the background and as a stream, and whether they are all.

        Raises:
            InvalidRequestError: It was created in another way.
        """
        events = self._find(response_id).events
        if events is None:
            reason = "this response was not created with 'background': true and 'stream': true"
            raise request_errors.invalid_value("stream", reason)
        return await events.read(start)

    async def cancel(self, response_id: str) -> bytes:
        """Ends a response of the background; one that has ended stays as it is.

        Raises:
            InvalidRequestError: Its client waits for it, and ends it by leaving.
        """
        stored = self._find(response_id)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        elif not stored.is_background:
            raise request_errors.invalid_value("response_id", "only responses of the background can be cancelled")
        return stored.data

    async def delete(self, response_id: str) -> None:
        """Forgets a response, and ends it first."""
        stored = self._find(response_id)
        running = self._running.get(response_id)
        if stored.is_running and running is not None:
            await running.cancel()
        self.store.remove(response_id)

    async def input_items(self, response_id: str) -> tuple[StoredItem, ...]:
        """What the model read."""
        return self._find(response_id).input_items

    async def all_items(self, response_id: str) -> tuple[StoredItem, ...]:
        """What the model read and said.

        Raises:
            InvalidRequestError: It has not come to its end.
        """
        stored = self._find(response_id)
        if stored.is_running:
            raise request_errors.invalid_value("previous_response_id", "that response has not come to its end yet")
        return stored.input_items + stored.output_items

    async def find_item(self, item_id: str) -> Item | None:
        """An item that any of them has read or said."""
        return self.store.find_item(item_id)

    def _find(self, response_id: str) -> StoredResponse:
        stored = self.store.get(response_id)
        if stored is None:
            raise response_not_found(response_id)
        return stored


def response_not_found(response_id: str) -> HTTPError:
    """It never was, has made room for others, or went with its process."""
    message = f"Response with id '{request_errors.echo(response_id)}' not found."
    return HTTPError(ErrorAnswer(404, INVALID_REQUEST, NOT_FOUND, message, "response_id"))
