"""Responses that are generated in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from llmstack_server.apis.responses.event_log import EventLog
from llmstack_server.apis.responses.run import NumberedEvent, ResponseRun
from llmstack_server.apis.responses.store import ResponseStore, StoredResponse, encode
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import ErrorAnswer, HTTPError, answer_to, server_shutting_down
from llmstack_server.web.sse import encode_json, frame_named


class BackgroundResponse:
    """One response with its own task, which counts as a request in flight: a drain waits for it.

    Attributes:
        stored: Its entry in the store, from its start on.
    """

    def __init__(self, state: ServerState, store: ResponseStore, run: ResponseRun, stored: StoredResponse) -> None:
        self.run = run
        self.stored = stored
        self._state = state
        self._store = store
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[], object]) -> None:
        """Stores the response and starts its task; `on_end` is called at its end.

        Raises:
            ServerOverloadedError: The store is full of running responses.
        """
        self._store.put(self.stored)
        self._task = asyncio.create_task(self._drive())
        self._task.add_done_callback(lambda _task: on_end())

    async def cancel(self) -> None:
        """Cancels the response, which keeps its output so far; returns after its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _drive(self) -> None:
        with self._state.in_flight.track():
            try:
                await self._generate_until_cut()
            except asyncio.CancelledError:
                self.run.cancel()
            except Exception as error:  # noqa: BLE001 (any error becomes that of the response)
                self._fail(answer_to(error, self.stored.id))
            finally:
                self._end()

    async def _generate_until_cut(self) -> None:
        generating = asyncio.create_task(self._generate())
        cutting = asyncio.create_task(self._state.in_flight.wait_until_cut())
        try:
            await asyncio.wait((generating, cutting), return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():
                raise HTTPError(server_shutting_down())
            generating.result()
        finally:
            generating.cancel()
            cutting.cancel()
            await asyncio.gather(generating, cutting, return_exceptions=True)

    async def _generate(self) -> None:
        async with aclosing(self.run.events()) as events:
            async for event in events:
                self._log(event)

    def _log(self, event: NumberedEvent) -> None:
        log = self.stored.events
        if log is not None:
            framed = frame_named(event)
            log.append(framed)
            self._store.grow(self.stored, len(framed))

    def _fail(self, error: ErrorAnswer) -> None:
        event = self.run.fail(error)
        if self.stored.events is not None:
            self.stored.events.append(frame_named(event))

    def _end(self) -> None:
        items = tuple(encode(item) for item in self.run.output_items())
        data = encode_json(self.run.as_object()).encode("utf-8", "replace")
        self._store.complete(self.stored, data, items)
        if self.stored.events is not None:
            self.stored.events.close()


def new_background_response(
    state: ServerState, store: ResponseStore, run: ResponseRun, stored: StoredResponse
) -> BackgroundResponse:
    """A response in the background, with an event log where the client asked for a stream."""
    if run.response.fields.stream:
        stored.events = EventLog()
    return BackgroundResponse(state, store, run, stored)
