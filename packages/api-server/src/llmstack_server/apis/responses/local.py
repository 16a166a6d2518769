"""Responses of one process: stored ones, and those in the background."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llmstack_llm import request_errors
from llmstack_server.apis.responses.background import BackgroundResponse
from llmstack_server.apis.responses.objects import error_object
from llmstack_server.apis.responses.run import ResponseRun
from llmstack_server.apis.responses.store import Item, ResponseStore, StoredItem, StoredResponse, events_of
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.stream_record import StreamReader
from llmstack_server.web.errors import ErrorAnswer, HTTPError, error_answer, storage_unavailable
from llmstack_server.web.sse import encode_json, frame_named

if TYPE_CHECKING:
    from llmstack_server.apis.responses.saver import ResponseSaver
    from llmstack_server.state.kept_rows import KeptRequest

NOT_FOUND = "not_found"


class LocalResponses:
    """Responses by id and owner; an unknown or foreign id raises HTTPError 404."""

    def __init__(self, state: ServerState, store: ResponseStore, saver: ResponseSaver | None = None) -> None:
        """`saver`: Keeps the store on a disk; None keeps it in memory alone."""
        self.store = store
        self.saver = saver
        self._state = state
        self._running: dict[str, BackgroundResponse] = {}

    async def start(
        self, run: ResponseRun, owner: str, input_items: tuple[StoredItem, ...], request: KeptRequest | None,
        source: AnswerSource | None,
    ) -> None:  # fmt: skip
        """Starts a response in the background; where it is kept on a disk, once it is there.

        `request`, `source`: From which another server generates it again; None where nothing keeps it.

        Raises:
            ServerOverloadedError: The store is full of running responses.
            HTTPError: 503, the disk cannot be written.
        """
        data = encode_json(run.as_object()).encode("utf-8", "replace")
        stored = StoredResponse(
            run.response.id, owner, input_items, data=data, is_background=True, is_running=True, request=request,
            source=source,
        )  # fmt: skip
        if run.response.fields.stream:
            stored.events = events_of(stored.id, owner)
            if self.saver is not None:
                stored.events.hold()
        self.store.put(stored)
        await self._save(stored)
        self.resume(run, stored)

    async def _save(self, stored: StoredResponse) -> None:
        """Returns once a response of the store is on the disk; raises HTTPError 503, without it, where it cannot be."""
        try:
            if self.saver is not None and not await self.saver.saved():
                raise HTTPError(storage_unavailable(self.saver.failure))
        except BaseException:  # also where the client leaves before it has the id
            self.store.remove(stored.id)
            raise

    def resume(self, run: ResponseRun, stored: StoredResponse) -> None:
        """Starts a response that is in the store, with the events of an earlier run if there was one."""
        running = BackgroundResponse(self._state, self.store, run, stored)
        running.start(lambda: self._running.pop(stored.id, None))
        self._running[stored.id] = running

    def end_unstarted(self, stored: StoredResponse, status: str, error: ErrorAnswer | None = None) -> None:
        """Ends a response of an earlier server that cannot be continued."""
        response: dict[str, object] = json.loads(stored.data)
        response["status"] = status
        if error is not None:
            response["error"] = error_object(error)
            if stored.events is not None:
                number = stored.events.num_parts
                event = {"type": "response.failed", "sequence_number": number, "response": response}
                stored.events.put(frame_named(event))
        if stored.events is not None:
            stored.events.finish()
        self.store.complete(stored, encode_json(response).encode("utf-8", "replace"), ())

    async def keep(self, stored: StoredResponse) -> None:
        """Stores a response that has ended; returns when it is on the disk.

        Raises:
            HTTPError: 503, the disk cannot be written, and it is not stored.
        """
        self.store.put(stored)
        await self._save(stored)

    def check_storage(self) -> None:
        """Returns if a response can be stored; raises HTTPError 503 while it cannot."""
        if self.saver is not None:
            self.saver.check()

    async def fetch(self, response_id: str, owner: str) -> bytes:
        """The current state of a response, as JSON."""
        stored = self._find(response_id, owner)
        if response_id not in self._running:  # over, or begun by an earlier server and not again yet
            return stored.data
        return encode_json(self._running[response_id].run.as_object()).encode("utf-8", "replace")

    def open_events(self, response_id: str, owner: str, start: int) -> StreamReader:
        """A reader of the events of a streamed response in the background, from `start` on.

        Raises:
            InvalidRequestError: The response was not created in the background and as a stream.
        """
        events = self._find(response_id, owner).events
        if events is None:
            reason = "this response was not created with 'background': true and 'stream': true"
            raise request_errors.invalid_value("stream", reason)
        reader = events.open(min(start, events.num_parts))
        reader.position = start
        return reader

    async def cancel(self, response_id: str, owner: str) -> bytes:
        """Cancels a response in the background; one that has ended is unchanged.

        Raises:
            InvalidRequestError: The response runs in the foreground; closing its connection cancels it.
        """
        stored = self._find(response_id, owner)
        if not stored.is_background:
            raise request_errors.invalid_value("response_id", "only responses in the background can be cancelled")
        await self._cancel(stored)
        return stored.data

    async def delete(self, response_id: str, owner: str) -> None:
        """Deletes a response, and cancels it first if it runs.

        Raises:
            HTTPError: 503, the disk cannot be written; it is deleted there as soon as it can.
        """
        await self._cancel(self._find(response_id, owner))
        self.store.remove(response_id)
        if self.saver is not None and not await self.saver.saved():
            raise HTTPError(storage_unavailable(self.saver.failure))

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

    async def _cancel(self, stored: StoredResponse) -> None:
        running = self._running.get(stored.id)
        if running is not None:
            await running.cancel()
        elif stored.is_running:
            self.end_unstarted(stored, "cancelled")

    def _find(self, response_id: str, owner: str) -> StoredResponse:
        stored = self.store.get(response_id, owner)
        if stored is None:
            raise response_not_found()
        return stored


def response_not_found(param: str = "response_id") -> HTTPError:
    """The error for an id that was never used, is evicted, lost with its process, or another key's: all look alike."""
    return HTTPError(error_answer(NOT_FOUND, "There is no response with this id.", param))
